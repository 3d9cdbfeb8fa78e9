// Products of rows with packed panels, and what is done with them.
//
// A panel holds 2 * kLanes columns. fp32: [k][column]. int8: per group of kGroup rows of the matrix [pair of k][column][2]
// and then the scales of its columns as bf16, so that a panel is read from its first byte to its last.
#pragma once

namespace tailrace {
namespace {

constexpr int kPanel = 2 * kLanes;

struct Fp32Product {
  const Rows& x;
  int row;
  const uint8_t* panel;
  float* out;

  template <int R>
  void tile(int first) {
    vf sums[R][2] = {};
    const uint8_t* const w[2] = {panel, panel + Fp32Step::kBytes};
    dots<Fp32Step, R, 2>(x.values + (ptrdiff_t)(row + first) * x.columns, x.columns, w, 2 * Fp32Step::kBytes, x.columns, sums);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++) store(out + (first + r) * kPanel + c * kLanes, sums[r][c]);
  }
};

struct Int8Product {
  const Rows& x;
  int row;
  const uint8_t* panel;
  float* out;

  static constexpr int kSteps = kGroup / Int8Step::kValues;
  static constexpr int kScales = kSteps * 2 * Int8Step::kBytes;  // where they lie in a group
  static constexpr int kBytes = kScales + 2 * kPanel;

  template <int R>
  void tile(int first) {
    const int groups = x.columns / kGroup;
    const int16_t* q = x.q + (ptrdiff_t)(row + first) * x.columns;
    const float* scales = x.scales + (ptrdiff_t)(row + first) * groups;
    const uint8_t* group = panel;
    vf sums[R][2] = {};
    for (int g = 0; g < groups; g++, group += kBytes, q += kGroup) {
      vi whole[R][2] = {};
      const uint8_t* const w[2] = {group, group + Int8Step::kBytes};
      dots<Int8Step, R, 2>(q, x.columns, w, 2 * Int8Step::kBytes, kSteps, whole);
      const uint16_t* bits = (const uint16_t*)(group + kScales);
      const vf worth[2] = {load_bf16(bits), load_bf16(bits + kLanes)};
      for (int r = 0; r < R; r++) {
        const vf unit = splat(scales[r * groups + g]);
        for (int c = 0; c < 2; c++) sums[r][c] = fma(to_float(whole[r][c]), worth[c] * unit, sums[r][c]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++) store(out + (first + r) * kPanel + c * kLanes, sums[r][c]);
  }
};

template <class Product>
void product(const Rows& x, int row, int rows, const uint8_t* panel, float* out) {
  tiled(rows, Product{x, row, panel, out});
}

inline vf biased(const float* panel, const float* bias, int c) {
  const vf v = load(panel + c);
  return bias ? v + load(bias + c) : v;
}

void store_panel(const float* panel, const float* bias, int rows, float* to, ptrdiff_t stride) {
  for (int r = 0; r < rows; r++, panel += kPanel, to += stride)
    for (int c = 0; c < kPanel; c += kLanes) store(to + c, biased(panel, bias, c));
}

void add_panel(const float* panel, const float* bias, int rows, float* to, ptrdiff_t stride) {
  for (int r = 0; r < rows; r++, panel += kPanel, to += stride)
    for (int c = 0; c < kPanel; c += kLanes) store(to + c, load(to + c) + biased(panel, bias, c));
}

template <class Activation>
void gate_panel(const float* gate, const float* up, const float* gate_bias, const float* up_bias, int rows, float* to,
                ptrdiff_t stride) {
  for (int r = 0; r < rows; r++, gate += kPanel, up += kPanel, to += stride)
    for (int c = 0; c < kPanel; c += kLanes) store(to + c, Activation::of(biased(gate, gate_bias, c)) * biased(up, up_bias, c));
}

}  // namespace
}  // namespace tailrace
