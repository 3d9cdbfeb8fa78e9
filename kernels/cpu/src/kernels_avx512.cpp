#include "simd/avx512.h"
#include "kernels.h"

const tailrace::Kernels tailrace::avx512_kernels = TAILRACE_KERNELS("avx512");
