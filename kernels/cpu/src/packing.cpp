#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tailrace {
namespace {

// One group of one output: its weights as int8, and what a unit is worth. That is rounded up to bf16, and the weights
// are rounded to multiples of what is stored, so that storing the scale in 16 bits costs next to nothing.
uint16_t quantize(const float* weights, int count, int8_t* q) {
  float most = 0;
  bool sound = true;
  for (int i = 0; i < count; i++) {
    most = std::max(most, std::fabs(weights[i]));
    sound = sound && std::isfinite(weights[i]);
  }
  if (!sound) {  // shows in whatever is computed with it
    std::memset(q, 1, kGroup);
    return to_bf16(NAN);
  }
  uint16_t bits = to_bf16(most / 127.0f);
  if (from_bf16(bits) * 127.0f < most) bits++;
  const float unit = from_bf16(bits);
  for (int i = 0; i < kGroup; i++) {
    const float steps = i < count && unit > 0 ? weights[i] / unit : 0.0f;
    q[i] = (int8_t)std::lrintf(std::min(127.0f, std::max(-127.0f, steps)));
  }
  return bits;
}

void pack_int8(int columns, const float* weight, int inputs, int outputs, int first, uint8_t* panel) {
  for (int k = 0; k < inputs; k += kGroup, panel += kGroup * columns + 2 * columns) {
    uint16_t* scales = (uint16_t*)(panel + kGroup * columns);
    for (int c = 0; c < columns; c++) {
      int8_t q[kGroup] = {};
      scales[c] = first + c < outputs
                      ? quantize(weight + (size_t)(first + c) * inputs + k, std::min(kGroup, inputs - k), q)
                      : 0;
      for (int i = 0; i < kGroup; i++) panel[(i / 2 * columns + c) * 2 + i % 2] = (uint8_t)q[i];
    }
  }
}

void pack_fp32(int columns, const float* weight, int inputs, int outputs, int first, float* panel) {
  for (int c = 0; c < columns; c++) {
    for (int k = 0; k < round_up(inputs, kGroup); k++)
      panel[k * columns + c] = first + c < outputs && k < inputs ? weight[(size_t)(first + c) * inputs + k] : 0.0f;
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
  const size_t padded = round_up(inputs, kGroup), columns = 2 * lanes;
  return format == kFp32 ? padded * columns * sizeof(float) : padded * columns + padded / kGroup * columns * 2;
}

void pack_panel(Format format, int lanes, const float* weight, int inputs, int outputs, int first, uint8_t* panel) {
  if (format == kFp32) pack_fp32(2 * lanes, weight, inputs, outputs, first, (float*)panel);
  else pack_int8(2 * lanes, weight, inputs, outputs, first, panel);
}

}  // namespace tailrace
