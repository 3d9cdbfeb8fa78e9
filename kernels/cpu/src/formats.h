// What the step driver (compiled for every CPU) and the kernels (compiled once per instruction set) tell each other.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tailrace {

// Columns that share one scale, in the integer formats, of weights as of activations.
constexpr int kGroup = 32;
// The most rows that a tile computes at a time.
constexpr int kTileRows = 6;
// The most rows, tokens times query heads, that one attention task computes.
constexpr int kAttentionRows = 48;
// The widest head.
constexpr int kHeadMax = 256;
// The longest block: 32 bits hold the sum of so many int8 values, each times a weight of 16 bits.
constexpr int kBlockMax = 512;
static_assert((int64_t)kBlockMax * 32767 * 127 <= INT32_MAX, "a block's values would not add up");

enum Format : int { kFp32 = 0, kInt8 = 1, kBf16 = 2, kInt4 = 3, kFormats = 4 };
constexpr int kKvFormats = 2;  // the first two: keys and values have no others
enum Activation : int { kSilu = 0, kGeluTanh = 1, kActivations = 2 };

// static: a function shared between files could be one that was compiled for another instruction set.
static constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
static constexpr bool has_integer_weights(Format format) { return format == kInt8 || format == kInt4; }

// The inputs of a product, one row per token. fp32 and bf16 weights are multiplied by `values`, int8 weights by the 16 bits
// of `q`, int4 weights by the 8 bits of `bytes`. Of these one unit is worth `scales[column / kGroup]`. `columns` is a
// multiple of kGroup; what a layer doesn't have is 0.
struct Rows {
  float* values;
  int16_t* q;
  int8_t* bytes;
  float* scales;
  float* middles;  // int4 only: what 0 stands for
  float* totals;   // int4 only: what the inputs of a group are worth together
  int columns;
};

// How keys and values of one block and one KV head lie in memory (a "page"), in one of the formats.
//
//   keys    [vector of tokens][step over head_dim][token]     int8: a step is a pair of dimensions
//   values  [vector of dimensions][step over tokens][dim]     int8: a step is a pair of tokens
//   int8 only: a scale per token for its key, then for its value
//
// A vector holds as many as the instruction set has fp32 lanes; tokens and dimensions are padded to it.
struct KvLayout {
  int block_size;
  int tokens;     // block_size, padded
  int head_dim;
  int dims;       // head_dim, padded
  size_t values;  // where they begin, bytes
  size_t scales;
  size_t bytes;
};

// One KV head of one row, on its way into the cache: the query heads that read it and its key, to be rotated in place.
struct Placing {
  float* query;
  int queries;
  float* key;
  const float* value;
  const float* cosines;     // head_dim / 2 each
  const float* sines;
  const float* query_norm;  // weights of RMSNorm over a head, or null
  const float* key_norm;
  float eps;
  uint8_t* page;
  int offset;               // of the token in its page
};

// Rows of one sequence that attend through one KV head: `tokens` from `first_position` on, `queries` heads each.
struct Attending {
  const float* query;
  float* out;
  ptrdiff_t query_stride;  // between tokens, values
  ptrdiff_t out_stride;
  int tokens;
  int queries;
  int first_position;
  int window;              // how many positions a token sees, itself included; 0 for all
  const uint8_t* pages;    // of block 0
  size_t page_stride;      // between blocks, bytes
  const int32_t* block_table;
  float scale;             // of scores, before softmax
  float soft_cap;          // then score = soft_cap * tanh(score / soft_cap); 0: not
  uint8_t* scratch;        // attention_scratch bytes
};

// Everything that is compiled once per instruction set. A panel is 2 * lanes columns of a weight matrix.
struct Kernels {
  const char* name;
  int lanes;
  // out[row][column of the panel] = x[row] · panel, for `rows` rows from `row` on.
  void (*product[kFormats])(const Rows& x, int row, int rows, const uint8_t* panel, float* out);
  // The inputs of a product out of n values, padded with zeros to a multiple of kGroup.
  void (*inputs[kFormats])(const float* x, Rows& out, int row);
  // The same of RMSNorm(x): weight * x / sqrt(sum(x²) / n + eps).
  void (*normed_inputs[kFormats])(const float* x, const float* weight, float eps, int n, Rows& out, int row);
  // What becomes of a product's panels: stored, added to the residual, or joined as activation(gate) * up. `bias` may be null.
  void (*store)(const float* panel, const float* bias, int rows, float* to, ptrdiff_t stride);
  void (*add)(const float* panel, const float* bias, int rows, float* to, ptrdiff_t stride);
  void (*gate[kActivations])(const float* gate, const float* up, const float* gate_bias, const float* up_bias, int rows,
                             float* to, ptrdiff_t stride);
  // residual += RMSNorm(x), n values padded with zeros to `padded`.
  void (*add_normed)(const float* x, const float* weight, float eps, int n, int padded, float* residual);
  KvLayout (*kv_layout[kKvFormats])(int block_size, int head_dim);
  void (*place[kKvFormats])(const KvLayout& kv, const Placing& placing);
  size_t (*attention_scratch[kKvFormats])(const KvLayout& kv, int rows);
  void (*attend[kKvFormats])(const KvLayout& kv, const Attending& attending);
  // x = cap * tanh(x / cap)
  void (*soft_cap)(float* x, int n, float cap);
  // The first largest of n values; NaN when one of them is NaN.
  float (*largest)(const float* x, int n, int32_t* where);
};

// By name, or the fastest for an empty one; null where this build or this CPU lacks it.
const Kernels* find_kernels(const char* name);

extern const Kernels generic_kernels;
extern const Kernels generic_wide_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;

}  // namespace tailrace
