// Keys and values on their way into the cache: rotated, and quantised per token and head in the int8 format.
#pragma once

namespace tailrace {
namespace {

template <class S>
KvLayout kv_layout(int block_size, int head_dim) {
  KvLayout kv{};
  kv.block_size = block_size;
  kv.tokens = round_up(block_size, kLanes);
  kv.head_dim = head_dim;
  kv.dims = round_up(head_dim, kLanes);
  const size_t numbers = (size_t)kv.tokens * kv.dims * S::kBytes / (kLanes * S::kValues);
  kv.values = numbers;
  kv.scales = 2 * numbers;
  kv.bytes = 2 * numbers + (S::kValues == 2 ? 2 * sizeof(float) * kv.tokens : 0);
  return kv;
}

inline void normalize_head(float* head, const float* weight, int n, float eps) {
  float squares = 0;
  for (int i = 0; i < n; i++) squares += head[i] * head[i];
  const float scale = 1.0f / __builtin_sqrtf(squares / n + eps);
  for (int i = 0; i < n; i++) head[i] = head[i] * scale * weight[i];
}

// Turns each pair (i, i + n / 2) by its angle.
inline void rotate_head(float* head, const float* cosines, const float* sines, int n) {
  float* second = head + n / 2;
  for (int i = 0; i < n / 2; i++) {
    const float a = head[i], b = second[i];
    head[i] = a * cosines[i] - b * sines[i];
    second[i] = b * cosines[i] + a * sines[i];
  }
}

// One number of step `step / kValues` into its lane of a vector that begins at `vector`.
template <class S, class T>
inline void put_number(uint8_t* vector, int step, int lane, T number) {
  ((T*)(vector + step / S::kValues * S::kBytes))[lane * S::kValues + step % S::kValues] = number;
}

template <class S, class T>
void put_token(const KvLayout& kv, uint8_t* page, int offset, const T* key, const T* value) {
  const size_t key_vector = (size_t)kv.dims / S::kValues * S::kBytes;
  const size_t value_vector = (size_t)kv.tokens / S::kValues * S::kBytes;
  uint8_t* keys = page + offset / kLanes * key_vector;
  for (int d = 0; d < kv.head_dim; d++) {
    put_number<S>(keys, d, offset % kLanes, key[d]);
    put_number<S>(page + kv.values + d / kLanes * value_vector, offset, d % kLanes, value[d]);
  }
}

inline void write_token(const KvLayout& kv, uint8_t* page, int offset, const float* key, const float* value, Fp32Step) {
  put_token<Fp32Step>(kv, page, offset, key, value);
}

// A head as 8-bit integers; returns what one unit is worth.
inline float quantize_head(const float* head, int n, int8_t* q) {
  int32_t most = 0;
  for (int i = 0; i < n; i++) {
    int32_t bits;
    std::memcpy(&bits, head + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  const float largest = from_bits(most), units = fill(largest, 127.0f);
  for (int i = 0; i < n; i++) q[i] = (int8_t)__builtin_lrintf(head[i] * units);
  return largest / 127.0f;
}

inline void write_token(const KvLayout& kv, uint8_t* page, int offset, const float* key, const float* value, Int8Step) {
  int8_t keys[kHeadMax], values[kHeadMax];
  float* scales = (float*)(page + kv.scales) + offset;
  scales[0] = quantize_head(key, kv.head_dim, keys);
  scales[kv.tokens] = quantize_head(value, kv.head_dim, values);
  put_token<Int8Step>(kv, page, offset, keys, values);
}

template <class S>
void place(const KvLayout& kv, const Placing& p) {
  const int n = kv.head_dim;
  for (int i = 0; i < p.queries; i++) {
    if (p.query_norm) normalize_head(p.query + i * n, p.query_norm, n, p.eps);
    rotate_head(p.query + i * n, p.cosines, p.sines, n);
  }
  if (p.key_norm) normalize_head(p.key, p.key_norm, n, p.eps);
  rotate_head(p.key, p.cosines, p.sines, n);
  write_token(kv, p.page, p.offset, p.key, p.value, S());
}

}  // namespace
}  // namespace tailrace
