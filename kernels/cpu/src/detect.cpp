#include <cstring>

#include "formats.h"

namespace tailrace {
namespace {

bool always() { return true; }

#if defined(TAILRACE_AVX2)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif
#if defined(TAILRACE_AVX512)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}
#endif

// The fastest first; which of them there are is known when this file is compiled, after them.
const struct {
  const Kernels& kernels;
  bool (*supported)();
} kKnown[] = {
#if defined(TAILRACE_AVX512)
    {avx512_kernels, has_avx512},
#endif
#if defined(TAILRACE_AVX2)
    {avx2_kernels, has_avx2},
#endif
    {generic_kernels, always},
    {generic_wide_kernels, always},
};

}  // namespace

const Kernels* find_kernels(const char* name) {
  for (const auto& known : kKnown)
    if ((!*name || std::strcmp(known.kernels.name, name) == 0) && known.supported()) return &known.kernels;
  return nullptr;
}

}  // namespace tailrace
