// Vectors for any CPU, in the vector extensions of GCC and Clang, which both lower to what the machine has (NEON, SSE2).
// The file that includes this says how wide they are: TAILRACE_LANES fp32 values.
#pragma once
#include <cstdint>
#include <cstring>

namespace tailrace {
namespace {

constexpr int kLanes = TAILRACE_LANES;
typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef int16_t vs __attribute__((vector_size(4 * kLanes)));
typedef int16_t vhalf __attribute__((vector_size(2 * kLanes)));
typedef uint16_t vbits16 __attribute__((vector_size(2 * kLanes)));
typedef int8_t vbytes __attribute__((vector_size(2 * kLanes)));
typedef uint8_t vfours __attribute__((vector_size(4 * kLanes)));

#if !defined(TAILRACE_OWN_PRIMITIVES)

constexpr int kWideTile = 6, kFoursTile = 6;

inline vf splat(float x) {
  vf v;
  for (int i = 0; i < kLanes; i++) v[i] = x;
  return v;
}

inline vi splat_bits(int32_t x) {
  vi v;
  for (int i = 0; i < kLanes; i++) v[i] = x;
  return v;
}

inline vf fma(vf a, vf b, vf c) { return a * b + c; }

// To the nearest, for |x| < 2^22: adding this number leaves the integer in the lowest bits.
inline vi round_to_int(vf x) { return (vi)(x + splat(12582912.0f)) - splat_bits(0x4B400000); }

// acc[i] + w[2i] * x[2i] + w[2i + 1] * x[2i + 1]
inline vi dot_pairs(vi acc, vs w, vi x) {
  const vi wide = (vi)w;
  return acc + (wide << 16 >> 16) * (x << 16 >> 16) + (wide >> 16) * (x >> 16);
}

// The sum of products of fours: w unsigned and below 16, x signed; a group's sum fits into it.
typedef vi vfour_sum;
inline vi dot_fours(vi acc, vfours w, vi x) {
  const vi wide = (vi)w;
  for (int at = 0; at < 32; at += 8) acc += (wide >> at & 255) * (x << (24 - at) >> 24);
  return acc;
}
inline vi whole(vi sum) { return sum; }

inline vs widen(const int8_t* p) {
  vbytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, vs);
}

// fp32 numbers whose lower 16 bits are zero.
inline vf load_bf16(const uint16_t* p) {
  vbits16 bits;
  std::memcpy(&bits, p, sizeof bits);
  return (vf)(__builtin_convertvector(bits, vi) << 16);
}

inline float sum(vf v) {
  float total = v[0];
  for (int i = 1; i < kLanes; i++) total += v[i];
  return total;
}

inline int32_t largest_bits(vi v) {
  int32_t most = v[0];
  for (int i = 1; i < kLanes; i++) most = v[i] > most ? v[i] : most;
  return most;
}

inline float largest(vf v) {
  float most = v[0];
  for (int i = 1; i < kLanes; i++) most = v[i] > most ? v[i] : most;
  return most;
}

#endif

}  // namespace
}  // namespace tailrace
