// Products of rows with packed panels, and what is done with them.
//
// A panel holds 2 * kLanes columns. fp32 and bf16: [k][column]. The integer formats: per group of kGroup rows of the matrix
// its weights, int8: [pair of k][column][2], int4: [four of k][column][2] with the second pair in the upper halves of the
// bytes; then the scales of its columns as bf16, and for int4 their middles, the weights that 0 stands for.
// So a panel is read from its first byte to its last.
#pragma once

namespace tailrace {
namespace {

constexpr int kPanel = 2 * kLanes;

template <class S>
struct FloatProduct {
  const Rows& x;
  int row;
  const uint8_t* panel;
  float* out;

  template <int R>
  void tile(int first) {
    vf sums[R][2] = {};
    const uint8_t* const w[2] = {panel, panel + S::kBytes};
    dots<S, R, 2>(x.values + (ptrdiff_t)(row + first) * x.columns, x.columns, w, 2 * S::kBytes, x.columns / S::kValues, sums);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++) store(out + (first + r) * kPanel + c * kLanes, sums[r][c]);
  }
};

// How a group's weights lie in a panel, and as what they are multiplied.
struct Int8Weights {
  typedef Int8Step Step;
  static constexpr int kBytes = kGroup * kPanel;
  static constexpr bool kHaveMiddle = false;
  static const uint8_t* ready(const uint8_t* packed, uint8_t*) { return packed; }
};

// Unpacked once for all rows of a tile: in its loop there is no register left for that.
struct Int4Weights {
  typedef WideStep Step;
  static constexpr int kBytes = kGroup / 2 * kPanel;
  static constexpr bool kHaveMiddle = true;
  static const uint8_t* ready(const uint8_t* packed, uint8_t* room) {
    uint8_t* to = room;
    for (int k = 0; k < kGroup; k += 4, to += 4 * Step::kBytes) {
      for (int c = 0; c < 2; c++, packed += 2 * kLanes) {
        const vs bytes = widen((const int8_t*)packed), lower = bytes << 12 >> 12, upper = bytes >> 4;
        std::memcpy(to + c * Step::kBytes, &lower, sizeof lower);
        std::memcpy(to + (2 + c) * Step::kBytes, &upper, sizeof upper);
      }
    }
    return room;
  }
};

template <class Weights>
struct IntegerProduct {
  const Rows& x;
  int row;
  const uint8_t* panel;
  float* out;

  typedef typename Weights::Step Step;
  static constexpr int kSteps = kGroup / Step::kValues;
  static constexpr int kScales = Weights::kBytes;  // where they lie in a group
  static constexpr int kMiddles = kScales + 2 * kPanel;
  static constexpr int kBytes = kMiddles + (Weights::kHaveMiddle ? 2 * kPanel : 0);

  template <int R>
  void tile(int first) {
    const int groups = x.columns / kGroup;
    const int16_t* q = x.q + (ptrdiff_t)(row + first) * x.columns;
    const float* scales = x.scales + (ptrdiff_t)(row + first) * groups;
    const uint8_t* group = panel;
    vf sums[R][2] = {};
    alignas(64) uint8_t room[kSteps * 2 * Step::kBytes];
    for (int g = 0; g < groups; g++, group += kBytes, q += kGroup) {
      vi whole[R][2] = {};
      const uint8_t* weights = Weights::ready(group, room);
      const uint8_t* const w[2] = {weights, weights + Step::kBytes};
      dots<Step, R, 2>(q, x.columns, w, 2 * Step::kBytes, kSteps, whole);
      const uint16_t* bits = (const uint16_t*)(group + kScales);
      const vf worth[2] = {load_bf16(bits), load_bf16(bits + kLanes)};
      for (int r = 0; r < R; r++) {
        const vf unit = splat(scales[r * groups + g]);
        for (int c = 0; c < 2; c++) sums[r][c] = fma(to_float(whole[r][c]), worth[c] * unit, sums[r][c]);
      }
      if (Weights::kHaveMiddle) add_middles(x.totals + (ptrdiff_t)(row + first) * groups + g, groups, group + kMiddles, sums);
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++) store(out + (first + r) * kPanel + c * kLanes, sums[r][c]);
  }

  // The middle times all inputs of the group.
  template <int R>
  static void add_middles(const float* totals, int groups, const uint8_t* middles, vf (&sums)[R][2]) {
    const uint16_t* bits = (const uint16_t*)middles;
    const vf from[2] = {load_bf16(bits), load_bf16(bits + kLanes)};
    for (int r = 0; r < R; r++)
      for (int c = 0; c < 2; c++) sums[r][c] = fma(splat(totals[r * groups]), from[c], sums[r][c]);
  }
};

typedef FloatProduct<Fp32Step> Fp32Product;
typedef FloatProduct<Bf16Step> Bf16Product;
typedef IntegerProduct<Int8Weights> Int8Product;
typedef IntegerProduct<Int4Weights> Int4Product;

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
