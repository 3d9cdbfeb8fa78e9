// Products of rows with packed panels, and what is done with them.
//
// A panel holds 2 * kLanes columns. fp32 and bf16: [k][column]. The integer formats: per group of kGroup rows of the matrix
// its weights, int8: [pair of k][column][2], int4: [eight of k][column][4] with the second four in the upper halves of the
// bytes, from 0 to 15; then the units of its columns as bf16, and for int4 their middles, the weights that 8 stands for.
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

// int8: weights are widened on their way into the product, and sums of groups stay in registers.
struct Int8Product {
  const Rows& x;
  int row;
  const uint8_t* panel;
  float* out;

  typedef Int8Step Step;
  static constexpr int kScales = kGroup * kPanel;  // where they lie in a group
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
      const uint8_t* const w[2] = {group, group + Step::kBytes};
      dots<Step, R, 2>(q, x.columns, w, 2 * Step::kBytes, kGroup / Step::kValues, whole);
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

// A group of int4 weights, made ready once for all rows. A weight is unit * q + least, an input scale * s + middle. So a sum
// of products is unit * scale * sum(q * s), and middle * unit * sum(q), and least times the sum of the inputs.
struct Int4Group {
  typedef FoursStep Step;
  static constexpr int kBytes = kGroup / 2 * kPanel + 4 * kPanel;
  alignas(64) uint8_t weights[kGroup * kPanel];
  vf units[2], sums[2], least[2];

  explicit Int4Group(const uint8_t* packed) {
    vfours total[2] = {};  // bytes hold them: kGroup / 4 numbers below 16
    uint8_t* to = weights;
    for (int k = 0; k < kGroup; k += 8, to += 4 * Step::kBytes) {
      for (int c = 0; c < 2; c++, packed += Step::kBytes) {
        const vfours both = Step::weights(packed), first = both & 15, second = both >> 4;
        std::memcpy(to + c * Step::kBytes, &first, sizeof first);
        std::memcpy(to + (2 + c) * Step::kBytes, &second, sizeof second);
        total[c] += first + second;
      }
    }
    const uint16_t* scales = (const uint16_t*)packed;
    for (int c = 0; c < 2; c++, scales += kLanes) {
      units[c] = load_bf16(scales);
      sums[c] = units[c] * to_float(sum_of_fours(total[c]));
      least[c] = fma(units[c], splat(-8.0f), load_bf16(scales + kPanel));
    }
  }

  static vi sum_of_fours(vfours bytes) {
    vi sum = splat_bits(0);
    for (int at = 0; at < 32; at += 8) sum += (vi)bytes >> at & 255;
    return sum;
  }
};

// What a group adds to the product.
struct Int4Product {
  const Int4Group& group;
  const Rows& x;
  int row;
  int number;  // of the group
  float* out;

  template <int R>
  void tile(int first) {
    typedef Int4Group::Step Step;
    Step::Sum sums[R][2] = {};
    const uint8_t* const w[2] = {group.weights, group.weights + Step::kBytes};
    const int groups = x.columns / kGroup;
    const ptrdiff_t at = (ptrdiff_t)(row + first) * groups + number;
    dots<Step, R, 2>(x.bytes + at * kGroup, x.columns, w, 2 * Step::kBytes, kGroup / Step::kValues, sums);
    const float *scales = x.scales + at, *middles = x.middles + at, *totals = x.totals + at;
    float* to = out + first * kPanel;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++, to += kPanel) {
      const vf scale = splat(scales[r * groups]), middle = splat(middles[r * groups]), total = splat(totals[r * groups]);
#pragma GCC unroll 2
      for (int c = 0; c < 2; c++) {
        vf sum = fma(to_float(whole(sums[r][c])) * group.units[c], scale, load(to + c * kLanes));
        sum = fma(group.sums[c], middle, sum);
        store(to + c * kLanes, fma(group.least[c], total, sum));
      }
    }
  }
};

template <class S>
void float_product(const Rows& x, int row, int rows, const uint8_t* panel, float* out) {
  tiled<S::kTile>(rows, FloatProduct<S>{x, row, panel, out});
}

void int8_product(const Rows& x, int row, int rows, const uint8_t* panel, float* out) {
  tiled<Int8Step::kTile>(rows, Int8Product{x, row, panel, out});
}

void int4_product(const Rows& x, int row, int rows, const uint8_t* panel, float* out) {
  std::memset(out, 0, sizeof(float) * rows * kPanel);
  for (int number = 0; number < x.columns / kGroup; number++, panel += Int4Group::kBytes) {
    const Int4Group group(panel);
    tiled<FoursStep::kTile>(rows, Int4Product{group, x, row, number, out});
  }
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
