// From rows of fp32 weights to panels.
#pragma once
#include "formats.h"

namespace tailrace {

size_t panel_bytes(Format format, int inputs, int lanes);

// Packs outputs [first, first + 2 * lanes) of a (outputs, inputs) matrix; what lies beyond it becomes 0.
void pack_panel(Format format, int lanes, const float* weight, int inputs, int outputs, int first, uint8_t* panel);

uint16_t to_bf16(float x);
float from_bf16(uint16_t bits);

}  // namespace tailrace
