#include "simd/avx2.h"
#include "kernels.h"

const tailrace::Kernels tailrace::avx2_kernels = TAILRACE_KERNELS("avx2");
