// From fp32 values to the inputs of a product: normalised where a layer wants it, in 16 or 8 bits where its format does.
#pragma once

namespace tailrace {
namespace {

constexpr int kGroupVectors = kGroup / kLanes;

// kGroup values as 16-bit integers; returns what one unit is worth. A group that holds NaN or infinity is worth that.
inline float quantize_group(const vf (&v)[kGroupVectors], int16_t* q) {
  vi most = magnitude_bits(v[0]);
  for (int i = 1; i < kGroupVectors; i++) most = larger_bits(most, magnitude_bits(v[i]));
  const float largest = from_bits(largest_bits(most));
  const vf units = splat(fill(largest, 32767.0f));
  for (int i = 0; i < kGroupVectors; i++) store_narrow(q + i * kLanes, round_to_int(v[i] * units));
  return largest / 32767.0f;
}

struct Int8Inputs {
  static void put(Rows& out, int row, int column, const vf (&v)[kGroupVectors]) {
    const ptrdiff_t at = (ptrdiff_t)row * out.columns + column;
    out.scales[at / kGroup] = quantize_group(v, out.q + at);
  }
};

// 8 bits between the least and the largest of a group: a lone large value takes the room of one side only.
struct Int4Inputs {
  static void put(Rows& out, int row, int column, const vf (&v)[kGroupVectors]) {
    const ptrdiff_t at = (ptrdiff_t)row * out.columns + column;
    vi magnitudes = magnitude_bits(v[0]);
    vf most = v[0], least = -v[0];
    for (int i = 1; i < kGroupVectors; i++) {
      magnitudes = larger_bits(magnitudes, magnitude_bits(v[i]));
      most = larger(v[i], most), least = larger(-v[i], least);
    }
    const float magnitude = from_bits(largest_bits(magnitudes)), lowest = -largest(least);
    const bool sound = magnitude < 3e38f;
    const float span = sound ? largest(most) - lowest : magnitude;
    const float units = fill(span, 254.0f), unit = span / 254.0f;
    // A whole number of units, so that 0, which fills up the last group, stays 0.
    const float from = units > 0 ? __builtin_rintf(lowest * units) + 128.0f : 0.0f;
    const float middle = units > 0 ? from * unit : sound ? lowest : 0.0f;
    vf total = splat(0.0f);
    for (int i = 0; i < kGroupVectors; i++) {
      const vi q = round_to_int(fma(v[i], splat(units), splat(-from)));
      store_bytes(out.bytes + at + i * kLanes, q);
      total += to_float(q);
    }
    out.scales[at / kGroup] = unit;
    out.middles[at / kGroup] = middle;
    out.totals[at / kGroup] = unit * sum(total) + (float)kGroup * middle;
  }
};

struct Fp32Inputs {
  static void put(Rows& out, int row, int column, const vf (&v)[kGroupVectors]) {
    float* to = out.values + (ptrdiff_t)row * out.columns + column;
    for (int i = 0; i < kGroupVectors; i++) store(to + i * kLanes, v[i]);
  }
};

template <class Inputs>
void inputs(const float* x, Rows& out, int row) {
  for (int column = 0; column < out.columns; column += kGroup) {
    vf v[kGroupVectors];
    for (int i = 0; i < kGroupVectors; i++) v[i] = load(x + column + i * kLanes);
    Inputs::put(out, row, column, v);
  }
}

inline float inverse_rms(const float* x, int padded, int n, float eps) {
  vf squares = splat(0.0f);
  for (int i = 0; i < padded; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  return 1.0f / __builtin_sqrtf(sum(squares) / n + eps);
}

template <class Inputs>
void normed_inputs(const float* x, const float* weight, float eps, int n, Rows& out, int row) {
  const vf scale = splat(inverse_rms(x, out.columns, n, eps));
  for (int column = 0; column < out.columns; column += kGroup) {
    vf v[kGroupVectors];
    for (int i = 0; i < kGroupVectors; i++) {
      const int at = column + i * kLanes;
      v[i] = load(x + at) * scale * load(weight + at);
    }
    Inputs::put(out, row, column, v);
  }
}

void add_normed(const float* x, const float* weight, float eps, int n, int padded, float* residual) {
  const vf scale = splat(inverse_rms(x, padded, n, eps));
  for (int i = 0; i < padded; i += kLanes) store(residual + i, load(residual + i) + load(x + i) * scale * load(weight + i));
}

void soft_cap(float* x, int n, float cap) {
  for (int i = 0; i < n; i += kLanes) {
    float some[kLanes] = {};
    const int count = n - i < kLanes ? n - i : kLanes;
    std::memcpy(some, x + i, count * sizeof *x);
    store(some, splat(cap) * tanh(load(some) * splat(1.0f / cap)));
    std::memcpy(x + i, some, count * sizeof *x);
  }
}

float largest_of(const float* x, int n, int32_t* where) {
  float best = x[0];
  int32_t best_at = 0;
  bool sound = true;
  int i = 0;
  if (n >= kLanes) {
    vf most = load(x);
    vi at = lane_numbers(), now = at, broken = splat_bits(0);
    for (; i + kLanes <= n; i += kLanes, now += kLanes) {
      const vf v = load(x + i);
      const vi above = v > most;
      broken |= (vi)(v != v);
      most = above ? v : most;
      at = above ? now : at;
    }
    best = most[0], best_at = at[0];
    for (int lane = 0; lane < kLanes; lane++) {
      sound = sound && !broken[lane];
      if (most[lane] > best || (most[lane] == best && at[lane] < best_at)) best = most[lane], best_at = at[lane];
    }
  }
  for (; i < n; i++) {
    sound = sound && x[i] == x[i];
    if (x[i] > best) best = x[i], best_at = i;
  }
  *where = best_at;
  return sound ? best : __builtin_nanf("");
}

}  // namespace
}  // namespace tailrace
