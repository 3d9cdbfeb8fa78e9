// The same as the generic kernels at the width of AVX-512: what is laid out by width is tested with it.
#define TAILRACE_LANES 16
#include "simd/generic.h"
#include "kernels.h"

const tailrace::Kernels tailrace::generic_wide_kernels = TAILRACE_KERNELS("generic_wide");
