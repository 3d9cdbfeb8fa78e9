// The inner loop of everything: R rows times C vectors of columns, summed over the steps of a packed matrix.
#pragma once

namespace tailrace {
namespace {

// fp32: a step is one value of a row and kLanes weights.
struct Fp32Step {
  typedef float X;
  typedef vf Sum;
  static constexpr int kTile = kWideTile;
  static constexpr int kValues = 1;
  static constexpr int kBytes = 4 * kLanes;
  static vf weights(const uint8_t* w) { return load((const float*)w); }
  static vf input(const float* x) { return splat(*x); }
  static vf add(vf sum, vf w, vf x) { return fma(w, x, sum); }
};

// bf16 weights, widened on their way: what is summed, and in which order, is what fp32 weights would give.
struct Bf16Step {
  typedef float X;
  typedef vf Sum;
  static constexpr int kTile = kWideTile;
  static constexpr int kValues = 1;
  static constexpr int kBytes = 2 * kLanes;
  static vf weights(const uint8_t* w) { return load_bf16((const uint16_t*)w); }
  static vf input(const float* x) { return splat(*x); }
  static vf add(vf sum, vf w, vf x) { return fma(w, x, sum); }
};

// int8 weights, 16-bit inputs, exact 32-bit sums: a step is a pair of values and kLanes pairs of weights.
struct Int8Step {
  typedef int16_t X;
  typedef vi Sum;
  static constexpr int kTile = kWideTile;
  static constexpr int kValues = 2;
  static constexpr int kBytes = 2 * kLanes;
  static vs weights(const uint8_t* w) { return widen((const int8_t*)w); }
  static vi input(const int16_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return splat_bits(pair);
  }
  static vi add(vi sum, vs w, vi x) { return dot_pairs(sum, w, x); }
};

// Weights from 0 to 15 in bytes, 8-bit inputs: a step is four values and kLanes fours of weights.
struct FoursStep {
  typedef int8_t X;
  typedef vfour_sum Sum;
  static constexpr int kTile = kFoursTile;
  static constexpr int kValues = 4;
  static constexpr int kBytes = 4 * kLanes;
  static vfours weights(const uint8_t* w) {
    vfours v;
    std::memcpy(&v, w, sizeof v);
    return v;
  }
  static vi input(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return splat_bits(four);
  }
  static vfour_sum add(vfour_sum sum, vfours w, vi x) { return dot_fours(sum, w, x); }
};

// sums[r][c] += x[r] · w[c]. Rows lie x_stride apart, the steps of a column vector w_stride bytes. The order of a sum is
// that of the steps, whatever R and C are: a row's result never depends on its neighbours.
template <class S, int R, int C>
__attribute__((always_inline)) inline void dots(const typename S::X* x, ptrdiff_t x_stride, const uint8_t* const (&w)[C],
                                                ptrdiff_t w_stride, int steps, typename S::Sum (&sums)[R][C]) {
  // Unrolled further, GCC 12 adds integers up in another order, for which there are not registers enough.
#pragma GCC unroll 2
  for (int step = 0; step < steps; step++) {
    decltype(S::weights(nullptr)) weights[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) weights[c] = S::weights(w[c] + step * w_stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const auto input = S::input(x + r * x_stride + step * S::kValues);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = S::add(sums[r][c], weights[c], input);
    }
  }
}

// Calls body<R>(first row) for tiles of up to Most rows, as equal as they can be.
template <int Most, class Body>
inline void tiled(int rows, Body body) {
  static_assert(Most <= kTileRows, "there is no larger tile");
  const int tiles = (rows + Most - 1) / Most;
  for (int tile = 0, row = 0; tile < tiles; tile++) {
    const int r = (rows - row) / (tiles - tile);
    switch (r) {
      case 1: body.template tile<1>(row); break;
      case 2: body.template tile<2>(row); break;
      case 3: body.template tile<3>(row); break;
      case 4: body.template tile<4>(row); break;
      case 5: body.template tile<(Most < 5 ? Most : 5)>(row); break;
      default: body.template tile<Most>(row); break;
    }
    row += r;
  }
}

}  // namespace
}  // namespace tailrace
