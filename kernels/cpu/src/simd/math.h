// What every kernel does with vectors, written once over the primitives of an instruction set.
#pragma once

namespace tailrace {
namespace {

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

inline vf to_float(vi v) { return __builtin_convertvector(v, vf); }

inline void store_narrow(int16_t* p, vi v) {
  const vhalf narrow = __builtin_convertvector(v, vhalf);
  std::memcpy(p, &narrow, sizeof narrow);
}

inline void store_bytes(int8_t* p, vi v) {
  typedef int8_t quarter __attribute__((vector_size(kLanes)));
  const quarter bytes = __builtin_convertvector(v, quarter);
  std::memcpy(p, &bytes, sizeof bytes);
}

inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }

inline vi lane_numbers() {
  vi v;
  for (int i = 0; i < kLanes; i++) v[i] = i;
  return v;
}

inline vf larger(vf a, vf b) { return select(a > b, a, b); }

// Magnitudes compared as integers: in that order NaN is above infinity, so a broken number is never lost.
inline vi magnitude_bits(vf v) { return (vi)v & splat_bits(0x7FFFFFFF); }
inline vi larger_bits(vi a, vi b) { return a > b ? a : b; }

inline float from_bits(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// By what to multiply numbers up to `most` so that they fill `range`; 0 for nothing, for infinity and for NaN.
inline float fill(float most, float range) { return most > 1e-30f && most < 3e38f ? range / most : 0.0f; }

// 2^x to a relative error of 2e-7, for x <= 127; everything below -126 gives 2^-126. NaN stays NaN.
inline vf exp2(vf x) {
  x = select(splat(-126.0f) > x, splat(-126.0f), x);
  const vi whole = round_to_int(x);
  const vf f = x - to_float(whole);
  vf p = splat(1.5252733804059840e-5f);  // ln(2)^k / k!
  p = fma(p, f, splat(1.5403530393381609e-4f));
  p = fma(p, f, splat(1.3333558146428443e-3f));
  p = fma(p, f, splat(9.6181291076284772e-3f));
  p = fma(p, f, splat(5.5504108664821580e-2f));
  p = fma(p, f, splat(2.4022650695910072e-1f));
  p = fma(p, f, splat(6.9314718055994531e-1f));
  p = fma(p, f, splat(1.0f));
  return p * (vf)((whole + splat_bits(127)) << 23);
}

constexpr float kLog2E = 1.4426950408889634f;

inline vf exp2_bounded(vf x) { return exp2(select(x > splat(126.0f), splat(126.0f), x)); }

// 1 - 2 / (1 + exp(2x)): within 2e-7 of tanh, absolutely.
inline vf tanh(vf x) { return splat(1.0f) - splat(2.0f) / (splat(1.0f) + exp2_bounded(x * splat(2 * kLog2E))); }

// x / (1 + exp(-x))
struct Silu {
  static vf of(vf x) { return x / (splat(1.0f) + exp2_bounded(x * splat(-kLog2E))); }
};

// x / 2 * (1 + tanh(y)) with y = sqrt(2 / pi) * (x + 0.044715 x³), which is x / (1 + exp(-2y))
struct GeluTanh {
  static vf of(vf x) {
    const vf y = splat(0.7978845608028654f) * fma(splat(0.044715f) * x * x, x, x);
    return x / (splat(1.0f) + exp2_bounded(y * splat(-2 * kLog2E)));
  }
};

}  // namespace
}  // namespace tailrace
