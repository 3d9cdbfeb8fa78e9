#define TAILRACE_LANES 8
#include "simd/generic.h"
#include "kernels.h"

const tailrace::Kernels tailrace::generic_kernels = TAILRACE_KERNELS("generic");
