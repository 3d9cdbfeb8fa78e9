// AVX-512 with VNNI: 16 lanes, and one instruction for a product of pairs, or of fours of bytes, and its sum.
#pragma once
#include <immintrin.h>

#define TAILRACE_LANES 16
#define TAILRACE_OWN_PRIMITIVES
#include "generic.h"

namespace tailrace {
namespace {

constexpr int kWideTile = 6, kFoursTile = 6;

inline vf splat(float x) { return (vf)_mm512_set1_ps(x); }
inline vi splat_bits(int32_t x) { return (vi)_mm512_set1_epi32(x); }
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vi round_to_int(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }
inline vi dot_pairs(vi acc, vs w, vi x) { return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, (__m512i)x); }
typedef vi vfour_sum;
inline vi dot_fours(vi acc, vfours w, vi x) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)x); }
inline vi whole(vi sum) { return sum; }
inline vs widen(const int8_t* p) { return (vs)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline vf load_bf16(const uint16_t* p) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline float sum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
inline int32_t largest_bits(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
inline float largest(vf v) { return _mm512_reduce_max_ps((__m512)v); }

}  // namespace
}  // namespace tailrace
