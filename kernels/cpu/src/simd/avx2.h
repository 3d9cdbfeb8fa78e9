// AVX2 and FMA: 8 lanes. The product of pairs of 16-bit integers (vpmaddwd) does twice what fp32 does, that of pairs of
// bytes (vpmaddubsw) four times; both are exact here.
#pragma once
#include <immintrin.h>

#define TAILRACE_LANES 8
#define TAILRACE_OWN_PRIMITIVES
#include "generic.h"

namespace tailrace {
namespace {

// Rows of a tile: 16 registers hold their sums, two vectors of weights, an input and a product. GCC 12 needs some more for fours.
constexpr int kWideTile = 6, kFoursTile = 4;

inline vf splat(float x) { return (vf)_mm256_set1_ps(x); }
inline vi splat_bits(int32_t x) { return (vi)_mm256_set1_epi32(x); }
inline vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline vi round_to_int(vf x) { return (vi)_mm256_cvtps_epi32((__m256)x); }
inline vi dot_pairs(vi acc, vs w, vi x) { return acc + (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x); }
// Each 16 bits sum half of a group's products, of at most 15 and -128: no more than 30,720.
typedef vs vfour_sum;
inline vs dot_fours(vs acc, vfours w, vi x) { return acc + (vs)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
inline vi whole(vs sum) { return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
inline vs widen(const int8_t* p) { return (vs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline vf load_bf16(const uint16_t* p) {
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}

inline float sum(vf v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

inline int32_t largest_bits(vi v) {
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xB1)));
}

inline float largest(vf v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

}  // namespace
}  // namespace tailrace
