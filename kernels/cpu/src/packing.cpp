#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tailrace {
namespace {

// Of one group of one output. What isn't there is 0.
struct Group {
  float weights[kGroup] = {};
  int count = 0;
  float least = 0, most = 0;
  bool sound = true;

  Group(const Numbers& numbers, size_t first, int n) : count(n) {
    for (int i = 0; i < n; i++) {
      const float w = numbers[first + i];
      weights[i] = w;
      least = i ? std::min(least, w) : w;
      most = i ? std::max(most, w) : w;
      sound = sound && std::isfinite(w);
    }
  }
};

// How integers of a group become weights: unit * q + middle.
struct Scale {
  uint16_t unit, middle;  // bf16
};

// NaN shows in whatever is computed with it.
Scale broken(int8_t* q) {
  std::memset(q, 1, kGroup);
  return {to_bf16(NAN), 0};
}

// The unit is rounded up to bf16, and the weights are rounded to multiples of what is stored, so that storing it in 16
// bits costs next to nothing.
Scale quantize_to_8_bits(const Group& group, int8_t* q) {
  if (!group.sound) return broken(q);
  const float most = std::max(std::fabs(group.least), std::fabs(group.most));
  uint16_t bits = to_bf16(most / 127.0f);
  if (from_bf16(bits) * 127.0f < most) bits++;
  const float unit = from_bf16(bits);
  for (int i = 0; i < kGroup; i++) {
    const float steps = unit > 0 ? group.weights[i] / unit : 0.0f;
    q[i] = (int8_t)std::lrintf(std::min(127.0f, std::max(-127.0f, steps)));
  }
  return {bits, 0};
}

// Rounds to the 16 weights that a scale can say; returns the sum of squared errors.
float round_to(const Scale& scale, const Group& group, int8_t* q) {
  const float unit = from_bf16(scale.unit), middle = from_bf16(scale.middle), units = unit > 0 ? 1.0f / unit : 0.0f;
  float error = 0;
  for (int i = 0; i < group.count; i++) {
    const float steps = std::min(15.0f, std::max(0.0f, (group.weights[i] - middle) * units + 8.0f));
    q[i] = (int8_t)((int)(steps + 0.5f) - 8);
    const float missed = group.weights[i] - (unit * q[i] + middle);
    error += missed * missed;
  }
  return error;
}

// 16 weights from the least to the most lose nothing of a group that had 4 bits before. One that had more is better
// served by a finer unit, at the price of its outermost weights: of the ranges cut by up to a step at either end, the one
// with the smallest error.
Scale quantize_to_4_bits(const Group& group, int8_t* q) {
  if (!group.sound) return broken(q);
  constexpr float kCuts[] = {0.0f, 0.5f, 1.0f};
  const float step = (group.most - group.least) / 15.0f;
  Scale best{};
  float best_error = INFINITY;
  for (float below : kCuts) {
    for (float above : kCuts) {
      const uint16_t unit = to_bf16(step * (15.0f - below - above) / 15.0f);
      const Scale scale{unit, to_bf16(group.least + below * step + 8.0f * from_bf16(unit))};
      int8_t tried[kGroup] = {};
      const float error = round_to(scale, group, tried);
      if (!(error < best_error)) continue;
      best = scale, best_error = error;
      std::memcpy(q, tried, kGroup);
    }
  }
  return best;
}

// Calls put(column, output's group, k) for each group of inputs of each output in a panel.
template <class Put>
void each_group(int columns, const Numbers& weight, int inputs, int outputs, int first, Put&& put) {
  for (int k = 0; k < inputs; k += kGroup) {
    for (int c = 0; c < columns && first + c < outputs; c++)
      put(c, Group(weight, (size_t)(first + c) * inputs + k, std::min(kGroup, inputs - k)), k);
  }
}

void pack_int8(int columns, const Numbers& weight, int inputs, int outputs, int first, uint8_t* panel) {
  const size_t bytes = (kGroup + 2) * columns;
  each_group(columns, weight, inputs, outputs, first, [&](int c, const Group& group, int k) {
    int8_t q[kGroup] = {};
    uint8_t* to = panel + k / kGroup * bytes;
    ((uint16_t*)(to + kGroup * columns))[c] = quantize_to_8_bits(group, q).unit;
    for (int i = 0; i < kGroup; i++) to[(i / 2 * columns + c) * 2 + i % 2] = (uint8_t)q[i];
  });
}

void pack_int4(int columns, const Numbers& weight, int inputs, int outputs, int first, uint8_t* panel) {
  const size_t bytes = (kGroup / 2 + 4) * columns;
  each_group(columns, weight, inputs, outputs, first, [&](int c, const Group& group, int k) {
    int8_t q[kGroup] = {};
    uint8_t* to = panel + k / kGroup * bytes;
    const Scale scale = quantize_to_4_bits(group, q);
    uint16_t* scales = (uint16_t*)(to + kGroup / 2 * columns);
    scales[c] = scale.unit, scales[columns + c] = scale.middle;
    for (int i = 0; i < kGroup; i += 4) {
      for (int j = 0; j < 2; j++) to[(i / 4 * columns + c) * 2 + j] = (uint8_t)((q[i + j] & 15) | q[i + 2 + j] << 4);
    }
  });
}

void pack_fp32(int columns, const Numbers& weight, int inputs, int outputs, int first, float* panel) {
  for (int c = 0; c < columns && first + c < outputs; c++) {
    for (int k = 0; k < inputs; k++) panel[k * columns + c] = weight[(size_t)(first + c) * inputs + k];
  }
}

void pack_bf16(int columns, const Numbers& weight, int inputs, int outputs, int first, uint16_t* panel) {
  for (int c = 0; c < columns && first + c < outputs; c++) {
    for (int k = 0; k < inputs; k++) panel[k * columns + c] = to_bf16(weight[(size_t)(first + c) * inputs + k]);
  }
}

}  // namespace

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;  // NaN: rounding could make it infinite
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

size_t panel_bytes(Format format, int inputs, int lanes) {
  const size_t columns = 2 * lanes, padded = round_up(inputs, kGroup), groups = padded / kGroup;
  switch (format) {
    case kInt8: return groups * columns * (kGroup + sizeof(uint16_t));
    case kInt4: return groups * columns * (kGroup / 2 + 2 * sizeof(uint16_t));
    case kBf16: return padded * columns * sizeof(uint16_t);
    default: return padded * columns * sizeof(float);
  }
}

void pack_panel(Format format, int lanes, const Numbers& weight, int inputs, int outputs, int first, uint8_t* panel) {
  const int columns = 2 * lanes;
  std::memset(panel, 0, panel_bytes(format, inputs, lanes));
  switch (format) {
    case kInt8: return pack_int8(columns, weight, inputs, outputs, first, panel);
    case kInt4: return pack_int4(columns, weight, inputs, outputs, first, panel);
    case kBf16: return pack_bf16(columns, weight, inputs, outputs, first, (uint16_t*)panel);
    default: return pack_fp32(columns, weight, inputs, outputs, first, (float*)panel);
  }
}

}  // namespace tailrace
