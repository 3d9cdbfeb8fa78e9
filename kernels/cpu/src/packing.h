// From rows of weights to panels.
#pragma once
#include "formats.h"

namespace tailrace {

uint16_t to_bf16(float x);
float from_bf16(uint16_t bits);

// Numbers as a checkpoint has them: fp32, or bf16, which need not be widened first.
struct Numbers {
  const void* data;
  Format format;  // kFp32 or kBf16

  float operator[](size_t i) const { return format == kFp32 ? ((const float*)data)[i] : from_bf16(((const uint16_t*)data)[i]); }
};

size_t panel_bytes(Format format, int inputs, int lanes);

// Packs outputs [first, first + 2 * lanes) of a (outputs, inputs) matrix; what lies beyond it becomes 0.
void pack_panel(Format format, int lanes, const Numbers& weight, int inputs, int outputs, int first, uint8_t* panel);

}  // namespace tailrace
