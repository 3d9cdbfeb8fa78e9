#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tailrace {
namespace {

// Of one group of one output. Beyond the matrix the first weight stands in: what is multiplied with it is 0.
struct Group {
  float weights[kGroup];
  float least = 0, most = 0;
  bool sound = true;

  Group(const Numbers& numbers, size_t first, int count) {
    for (int i = 0; i < kGroup; i++) {
      const float w = i < count ? numbers[first + i] : weights[0];
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

typedef float Eight __attribute__((vector_size(32)));

Eight load(const float* from) {
  Eight x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// The nearest of the 16 weights that a scale can say, as numbers from -8 to 7.
struct Rounding {
  const float unit, middle, units;

  explicit Rounding(const Scale& scale)
      : unit(from_bf16(scale.unit)), middle(from_bf16(scale.middle)), units(unit > 0 ? 1.0f / unit : 0.0f) {}

  Eight of(Eight weights) const {
    const Eight least = Eight{} - 8.0f, most = Eight{} + 7.0f;
    Eight steps = (weights - middle) * units;
    steps = steps > least ? steps : least;
    steps = steps < most ? steps : most;
    return steps + 12582912.0f - 12582912.0f;  // at which a float has no fraction left
  }

  // Sum of squares.
  float error(const Group& group) const {
    Eight sums{};
    for (int i = 0; i < kGroup; i += 8) {
      const Eight weights = load(group.weights + i), missed = weights - (of(weights) * unit + middle);
      sums += missed * missed;
    }
    float total = 0;
    for (int i = 0; i < 8; i++) total += sums[i];
    return total;
  }
};

// The scale with the smallest error, of some. A group that had 4 bits before spans up to 15 of its old units, and is met by
// one of 15, 14 ... 8 (fewer, by their multiples). One that had more bits is best served by a unit so fine that its outermost
// weights are cut off.
class BestScale {
 public:
  explicit BestScale(const Group& group) : group_(group) {
    const float span = group.most - group.least;
    for (int units = 15; units >= 8 && !fits(); units--) offer(group.least, span / units);
    const float step = span / 15.0f;
    constexpr float kCuts[][2] = {{0.5f, 0.5f}, {1.0f, 0.0f}, {0.0f, 1.0f}, {1.0f, 1.0f}};
    for (int i = 0; i < 4 && !fits(); i++) {
      const auto [below, above] = kCuts[i];
      offer(group.least + below * step, step * (15.0f - below - above) / 15.0f);
    }
  }
  const Scale& scale() const { return scale_; }

 private:
  void offer(float least, float unit) {
    const uint16_t bits = to_bf16(unit);
    const Scale scale{bits, to_bf16(least + 8.0f * from_bf16(bits))};
    const float error = Rounding(scale).error(group_);
    if (error < error_) scale_ = scale, error_ = error;
  }

  // Weights that have these 16 values lie within a twentieth of a unit of them; others would be off by six times that.
  bool fits() const {
    const float near = 0.05f * from_bf16(scale_.unit);
    return error_ <= kGroup * near * near;
  }

  const Group& group_;
  Scale scale_{};
  float error_ = INFINITY;
};

Scale quantize_to_4_bits(const Group& group, int8_t* q) {
  if (!group.sound) return broken(q);
  const BestScale best(group);
  const Rounding rounding(best.scale());
  for (int i = 0; i < kGroup; i++) q[i] = (int8_t)rounding.of(load(group.weights + i / 8 * 8))[i % 8];
  return best.scale();
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
    for (int i = 0; i < kGroup; i += 8) {
      for (int j = 0; j < 4; j++) to[(i / 8 * columns + c) * 4 + j] = (uint8_t)((q[i + j] + 8) | (q[i + 4 + j] + 8) << 4);
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
