// Attention through one KV head: scores, softmax and the mix of values, chunk by chunk, with a running maximum.
//
// Chunks are whole blocks and begin at the same positions for everybody. So what a row gives depends on its own
// positions alone: not on who is computed beside it, nor on how its prompt was cut.
#pragma once

namespace tailrace {
namespace {

constexpr int kChunkTokens = 64;  // at least one block
constexpr float kNothing = -1e30f;
constexpr int32_t kNowhere = INT32_MAX;

// Where the parts of one attention task lie in its scratch memory.
template <class S>
struct AttentionScratch {
  typedef typename S::X X;
  X* query;         // [row][dims]
  float* units;     // [row] what a unit of a score is worth
  float* most;      // [row] the largest score so far
  float* total;     // [row] sum of weights
  float* mixed;     // [row][dims]
  float* scores;    // [tile row][column]
  X* weights;       // [tile row][column]
  float* mix_units; // [tile row]
  // Of the chunk: a column's position (kNowhere for the padding of a block), and what a unit of its key and value is worth.
  int32_t* positions;
  float* key_units;
  float* value_units;
  size_t bytes;

  AttentionScratch(const KvLayout& kv, int rows, uint8_t* memory) {
    uint8_t* next = memory;
    const int columns = chunk_blocks(kv) * kv.tokens;
    take(next, query, rows * kv.dims);
    take(next, units, rows);
    take(next, most, rows);
    take(next, total, rows);
    take(next, mixed, rows * kv.dims);
    take(next, scores, kTileRows * columns);
    take(next, weights, kTileRows * columns);
    take(next, mix_units, kTileRows);
    take(next, positions, columns);
    take(next, key_units, columns);
    take(next, value_units, columns);
    bytes = next - memory;
  }

  static int chunk_blocks(const KvLayout& kv) { return kv.block_size >= kChunkTokens ? 1 : kChunkTokens / kv.block_size; }

  template <class T>
  static void take(uint8_t*& next, T*& array, int count) {
    array = (T*)next;
    next += round_up(count * (int)sizeof(T), 64);
  }
};

template <class S>
size_t attention_scratch(const KvLayout& kv, int rows) {
  return AttentionScratch<S>(kv, rows, nullptr).bytes;
}

// The query, padded; `scale` turns a product with a key into an exponent of 2.
inline float take_query(const float* from, int n, int dims, float scale, float* to) {
  for (int i = 0; i < dims; i++) to[i] = i < n ? from[i] * scale : 0.0f;
  return 1.0f;
}

inline float take_query(const float* from, int n, int dims, float scale, int16_t* to) {
  int32_t most = 0;
  for (int i = 0; i < n; i++) {
    int32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  const float largest = from_bits(most), units = fill(largest, 32767.0f);
  for (int i = 0; i < dims; i++) to[i] = i < n ? (int16_t)__builtin_lrintf(from[i] * units) : (int16_t)0;
  return largest / 32767.0f * scale;
}

inline vf score_worth(const float*, int, Fp32Step) { return splat(1.0f); }
inline vf score_worth(const float* key_units, int column, Int8Step) { return load(key_units + column); }

// Weights of one row in the chunk as what the mix multiplies with; returns what a unit is worth.
inline float take_weights(float* p, int columns, float* to, const float*) {
  std::memcpy(to, p, columns * sizeof *p);
  return 1.0f;
}

inline float take_weights(float* p, int columns, int16_t* to, const float* value_units) {
  vi most = splat_bits(0);
  for (int c = 0; c < columns; c += kLanes) {
    const vf weight = load(p + c);
    // What has no weight may stand where nothing was ever written.
    const vf v = select(weight == splat(0.0f), splat(0.0f), weight * load(value_units + c));
    store(p + c, v);
    most = larger_bits(most, magnitude_bits(v));
  }
  const float largest = from_bits(largest_bits(most));
  const vf units = splat(fill(largest, 32767.0f));
  for (int c = 0; c < columns; c += kLanes) store_narrow(to + c, round_to_int(load(p + c) * units));
  return largest / 32767.0f;
}

inline vf number(vf sum) { return sum; }
inline vf number(vi sum) { return to_float(sum); }

template <class S>
struct Chunk {
  const KvLayout& kv;
  const Attending& a;
  AttentionScratch<S>& at;
  const uint8_t* const* pages;
  const uint8_t* const* next_pages;  // of the next chunk
  int blocks, next_blocks;
  int first;  // position of the chunk
  int end;    // behind the last position that a row of the task sees

  // What all rows need to know of the columns.
  void describe() {
    for (int b = 0, column = 0; b < blocks; b++) {
      const float* scales = (const float*)(pages[b] + kv.scales);
      for (int token = 0; token < kv.tokens; token++, column++) {
        at.positions[column] = token < kv.block_size ? first + b * kv.block_size + token : kNowhere;
        if (S::kValues == 2) at.key_units[column] = scales[token], at.value_units[column] = scales[kv.tokens + token];
      }
    }
  }

  template <int R>
  void tile(int row) {
    score<R>(row);
    for (int r = 0; r < R; r++) weigh(row + r, r);
    mix<R>(row);
  }

  template <int R>
  void score(int row) {
    for (int b = 0; b < blocks; b++) {
      // Pages lie anywhere, so no hardware guesses the next one.
      if (row == 0 && b < next_blocks) fetch(next_pages[b]);
      int token = 0;
      for (; token + 2 * kLanes <= kv.tokens; token += 2 * kLanes) score_columns<R, 2>(row, b, token);
      if (token < kv.tokens) score_columns<R, 1>(row, b, token);
    }
  }

  void fetch(const uint8_t* page) const {
    for (size_t at = 0; at < kv.bytes; at += 64) __builtin_prefetch(page + at, 0, 2);
  }

  template <int R, int C>
  void score_columns(int row, int block, int token) {
    const size_t vector_bytes = (size_t)kv.dims / S::kValues * S::kBytes;
    const int columns = blocks * kv.tokens, column = block * kv.tokens + token;
    const uint8_t* keys[C];
    for (int c = 0; c < C; c++) keys[c] = pages[block] + (token / kLanes + c) * vector_bytes;
    typename S::Sum sums[R][C] = {};
    dots<S, R, C>(at.query + row * kv.dims, kv.dims, keys, S::kBytes, kv.dims / S::kValues, sums);
    for (int r = 0; r < R; r++) {
      const vf unit = splat(at.units[row + r]);
      for (int c = 0; c < C; c++) {
        const int to = column + c * kLanes;
        store(at.scores + r * columns + to, number(sums[r][c]) * (score_worth(at.key_units, to, S()) * unit));
      }
    }
  }

  // Softmax of one row over the chunk, and what was mixed before brought down to the new maximum.
  void weigh(int row, int r) {
    const int columns = blocks * kv.tokens;
    const int position = a.first_position + row / a.queries;
    float* p = at.scores + r * columns;
    vf most = splat(kNothing);
    for (int c = 0; c < columns; c += kLanes) {
      vf s = load(p + c);
      if (a.soft_cap > 0) s = splat(a.soft_cap * kLog2E) * tanh(s * splat(1.0f / (a.soft_cap * kLog2E)));
      s = select(seen(c, position), s, splat(kNothing));
      store(p + c, s);
      most = larger(s, most);
    }
    const float chunk_most = largest(most), before = at.most[row];
    const float now = chunk_most > before ? chunk_most : before;
    vf total = splat(0.0f);
    for (int c = 0; c < columns; c += kLanes) {
      const vf weight = select(seen(c, position), exp2(load(p + c) - splat(now)), splat(0.0f));
      store(p + c, weight);
      total += weight;
    }
    const float keep = now == before ? 1.0f : exp2(splat(before - now))[0];
    at.most[row] = now;
    at.total[row] = at.total[row] * keep + sum(total);
    at.mix_units[r] = take_weights(p, columns, at.weights + r * columns, at.value_units);
    float* mixed = at.mixed + row * kv.dims;
    if (keep != 1.0f)
      for (int d = 0; d < kv.dims; d += kLanes) store(mixed + d, load(mixed + d) * splat(keep));
  }

  // Which of the columns from `c` on the row sees.
  vi seen(int c, int position) const {
    vi at_position;
    std::memcpy(&at_position, at.positions + c, sizeof at_position);
    vi mask = at_position <= splat_bits(position);
    if (a.window) mask &= at_position > splat_bits(position - a.window);
    return mask;
  }

  template <int R>
  void mix(int row) {
    const int columns = blocks * kv.tokens;
    const size_t vector_bytes = (size_t)kv.tokens / S::kValues * S::kBytes;
    int d = 0;
    for (; d + 2 * kLanes <= kv.dims; d += 2 * kLanes) mix_dims<R, 2>(row, d, columns, vector_bytes);
    if (d < kv.dims) mix_dims<R, 1>(row, d, columns, vector_bytes);
  }

  template <int R, int C>
  void mix_dims(int row, int d, int columns, size_t vector_bytes) {
    typename S::Sum sums[R][C] = {};
    for (int b = 0; b < blocks; b++) {
      const uint8_t* values = pages[b] + kv.values + d / kLanes * vector_bytes;
      const uint8_t* w[C];
      for (int c = 0; c < C; c++) w[c] = values + c * vector_bytes;
      // Behind the last position there may be anything, NaN included: it isn't even multiplied by 0.
      const int left = end - first - b * kv.block_size;
      const int tokens = left < kv.block_size ? left : kv.block_size;
      dots<S, R, C>(at.weights + b * kv.tokens, columns, w, S::kBytes, (tokens + S::kValues - 1) / S::kValues, sums);
    }
    for (int r = 0; r < R; r++) {
      for (int c = 0; c < C; c++) {
        float* to = at.mixed + (row + r) * kv.dims + d + c * kLanes;
        store(to, fma(number(sums[r][c]), splat(at.mix_units[r]), load(to)));
      }
    }
  }
};

template <class S>
void attend(const KvLayout& kv, const Attending& a) {
  const int rows = a.tokens * a.queries;
  AttentionScratch<S> at(kv, rows, a.scratch);
  for (int r = 0; r < rows; r++) {
    const float* query = a.query + r / a.queries * a.query_stride + r % a.queries * kv.head_dim;
    at.units[r] = take_query(query, kv.head_dim, kv.dims, a.scale * kLog2E, at.query + r * kv.dims);
    at.most[r] = kNothing;
    at.total[r] = 0.0f;
  }
  std::memset(at.mixed, 0, sizeof(float) * rows * kv.dims);

  const int end = a.first_position + a.tokens;
  const int blocks_per_chunk = at.chunk_blocks(kv), chunk = blocks_per_chunk * kv.block_size;
  const int oldest = a.window && a.first_position >= a.window ? a.first_position - a.window + 1 : 0;
  const uint8_t* pages[2][kChunkTokens];
  const auto find = [&](int first, const uint8_t** found) {
    int blocks = 0;
    for (; blocks < blocks_per_chunk && first + blocks * kv.block_size < end; blocks++)
      found[blocks] = a.pages + a.block_table[first / kv.block_size + blocks] * a.page_stride;
    return blocks;
  };
  int first = oldest / chunk * chunk, now = 0;
  for (int blocks = find(first, pages[now]); blocks; first += chunk, now ^= 1) {
    const int next_blocks = find(first + chunk, pages[now ^ 1]);
    Chunk<S> part{kv, a, at, pages[now], pages[now ^ 1], blocks, next_blocks, first, end};
    part.describe();
    tiled<S::kTile>(rows, part);
    blocks = next_blocks;
  }

  for (int r = 0; r < rows; r++) {
    float* out = a.out + r / a.queries * a.out_stride + r % a.queries * kv.head_dim;
    const float share = 1.0f / at.total[r];
    for (int d = 0; d < kv.head_dim; d++) out[d] = at.mixed[r * kv.dims + d] * share;
  }
}

}  // namespace
}  // namespace tailrace
