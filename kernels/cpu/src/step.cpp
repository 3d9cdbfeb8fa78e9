#include "step.h"

#include <algorithm>
#include <cmath>

namespace tailrace {
namespace {

constexpr int kByRowsFrom = 48;  // below it a block of rows for each thread would be too small
constexpr int kBlockRows = 48;   // a block's inputs and outputs stay in the second-level cache
constexpr int kPanelMax = 32;    // columns
constexpr int kTasksPerThread = 4;

}  // namespace

Step::Step(const Model& model, Scratch& scratch, Pool& pool, const tailrace_batch& batch)
    : m_(model),
      k_(model.kernels),
      s_(scratch),
      pool_(pool),
      b_(batch),
      queries_(model.shape.heads / model.shape.kv_heads),
      width_(2 * model.kernels.lanes),
      sequence_(batch.rows) {
  for (int s = 0; s < b_.sequences; s++)
    std::fill(sequence_.begin() + b_.row_starts[s], sequence_.begin() + b_.row_starts[s + 1], s);
  plan_attention();
}

void Step::plan_attention() {
  const int most = std::max(1, kAttentionRows / queries_);
  for (int s = 0; s < b_.sequences; s++) {
    for (int row = b_.row_starts[s]; row < b_.row_starts[s + 1]; row += most) {
      for (int kv_head = 0; kv_head < m_.shape.kv_heads; kv_head++)
        attention_.push_back({s, kv_head, row, std::min(most, b_.row_starts[s + 1] - row)});
    }
  }
}

void Step::run() {
  s_.reserve(b_.rows, b_.wanted);
  pool_.begin();
  if (b_.rows < kByRowsFrom) by_columns();
  else by_rows();
  if (b_.wanted) head();
  pool_.end();
}

void Step::by_columns() {
  const Range all{0, b_.rows};
  each_row([&](int row) { embed(row); });
  for (int l = 0; l < m_.shape.layers; l++) {
    const Layer& layer = m_.layers[l];
    each_row([&](int row) { norm(layer.attention_norm, {row, row + 1}); });
    each_part(layer.qkv.count, [&](Range panels) { join(layer, all, panels); });
    attend_all(l);
    each_row([&](int row) { narrow_attended({row, row + 1}); });
    each_part(layer.out.count, [&](Range panels) { project(layer, all, panels); });
    if (layer.out_norm) each_row([&](int row) { add_block(layer.out_norm, {row, row + 1}); });
    each_row([&](int row) { norm(layer.feed_forward_norm, {row, row + 1}); });
    each_part(layer.gate_up.count / 2, [&](Range pairs) { feed(layer, all, pairs); });
    each_row([&](int row) { narrow_fed({row, row + 1}); });
    each_part(layer.down.count, [&](Range panels) { unfeed(layer, all, panels); });
    if (layer.out_norm) each_row([&](int row) { add_block(layer.feed_forward_out_norm, {row, row + 1}); });
  }
}

void Step::by_rows() {
  const int threads = pool_.threads();
  const int blocks = round_up((b_.rows + kBlockRows - 1) / kBlockRows, threads);
  const auto each_block = [&](auto task) {
    pool_.each(blocks, [&](int block, int) {
      const Range rows{(int)((int64_t)b_.rows * block / blocks), (int)((int64_t)b_.rows * (block + 1) / blocks)};
      if (rows.first < rows.end) task(rows);
    });
  };
  const auto begin_layer = [&](int l, Range rows) {
    const Layer& layer = m_.layers[l];
    norm(layer.attention_norm, rows);
    join(layer, rows, {0, layer.qkv.count});
    for (int row = rows.first; row < rows.end; row++) place(l, row);
  };

  placed_ = true;
  each_block([&](Range rows) {
    for (int row = rows.first; row < rows.end; row++) embed(row);
    begin_layer(0, rows);
  });
  for (int l = 0; l < m_.shape.layers; l++) {
    const Layer& layer = m_.layers[l];
    attend_all(l);
    each_block([&](Range rows) {
      narrow_attended(rows);
      project(layer, rows, {0, layer.out.count});
      if (layer.out_norm) add_block(layer.out_norm, rows);
      norm(layer.feed_forward_norm, rows);
      feed(layer, rows, {0, layer.gate_up.count / 2});
      narrow_fed(rows);
      unfeed(layer, rows, {0, layer.down.count});
      if (layer.out_norm) add_block(layer.feed_forward_out_norm, rows);
      if (l + 1 < m_.shape.layers) begin_layer(l + 1, rows);
    });
  }
}

void Step::head() {
  const int stride = round_up(m_.shape.vocab_size, kGroup);
  pool_.each(b_.wanted, [&](int i, int) {
    const float* residual = s_.residual + (size_t)b_.wanted_rows[i] * m_.hidden;
    k_.normed_inputs[m_.head.format](residual, m_.final_norm, m_.shape.norm_eps, m_.shape.hidden_size, s_.last, i);
  });
  each_part(m_.head.count, [&](Range panels) {
    multiply(m_.head, s_.last, {0, b_.wanted}, panels, [&](int panel, int row, int rows, const float* out) {
      k_.store(out, nullptr, rows, b_.logits + (size_t)row * stride + panel * width_, stride);
    });
  });
  pool_.each(b_.wanted, [&](int i, int) {
    float* logits = b_.logits + (size_t)i * stride;
    if (m_.shape.logit_soft_cap > 0) k_.soft_cap(logits, m_.shape.vocab_size, m_.shape.logit_soft_cap);
    b_.best_logits[i] = k_.largest(logits, m_.shape.vocab_size, b_.best_tokens + i);
  });
}

void Step::embed(int row) {
  m_.embed(b_.tokens[row], s_.residual + (size_t)row * m_.hidden);
  const int half = m_.shape.head_dim / 2;
  const float at = (float)position(row);
  for (int rope = 0; rope < m_.shape.ropes; rope++) {
    const size_t first = angles_at(rope, row);
    for (int i = 0; i < half; i++) {
      const float angle = at * m_.frequencies[rope * half + i];
      s_.cosines[first + i] = std::cos(angle) * m_.gains[rope];
      s_.sines[first + i] = std::sin(angle) * m_.gains[rope];
    }
  }
}

void Step::norm(const float* weight, Range rows) {
  for (int row = rows.first; row < rows.end; row++)
    k_.normed_inputs[m_.format](s_.residual + (size_t)row * m_.hidden, weight, m_.shape.norm_eps, m_.shape.hidden_size, s_.narrow, row);
}

void Step::join(const Layer& layer, Range rows, Range panels) {
  multiply(layer.qkv, s_.narrow, rows, panels, [&](int panel, int row, int n, const float* out) {
    k_.store(out, bias(layer.qkv, panel), n, s_.joined + (size_t)row * m_.joined + panel * width_, m_.joined);
  });
}

void Step::place(int layer, int row) {
  for (int kv_head = 0; kv_head < m_.shape.kv_heads; kv_head++) place_head(layer, row, kv_head);
}

void Step::place_head(int layer, int row, int kv_head) {
  const int head = m_.shape.head_dim, at = position(row), block_size = m_.shape.block_size;
  const int block = b_.block_tables[b_.table_starts[sequence_[row]] + at / block_size];
  float* joined = s_.joined + (size_t)row * m_.joined;
  const size_t angles = angles_at(m_.layer_ropes[layer], row);
  float* key = joined + (m_.shape.heads + kv_head) * head;
  k_.place[m_.kv_format](m_.kv, {joined + kv_head * queries_ * head, queries_, key, key + m_.shape.kv_heads * head,
                                 s_.cosines + angles, s_.sines + angles,
                                 m_.layers[layer].query_norm, m_.layers[layer].key_norm, m_.shape.norm_eps,
                                 m_.pages(layer, kv_head) + block * m_.page_stride(), at % block_size});
}

void Step::attend_all(int layer) {
  // A lone row can be placed by whoever attends for it. The rows of a prefill see each other, and have to be there first.
  if (!placed_) {
    each_row([&](int row) {
      if (b_.row_starts[sequence_[row] + 1] - b_.row_starts[sequence_[row]] > 1) place(layer, row);
    });
  }
  pool_.each((int)attention_.size(), [&](int task, int worker) { attend(layer, attention_[task], worker); });
}

void Step::attend(int layer, const AttentionTask& task, int worker) {
  const int lone = b_.row_starts[task.sequence + 1] - b_.row_starts[task.sequence] == 1;
  if (lone && !placed_) place_head(layer, task.first_row, task.kv_head);
  const int first_head = task.kv_head * queries_ * m_.shape.head_dim;
  k_.attend[m_.kv_format](m_.kv, {s_.joined + (size_t)task.first_row * m_.joined + first_head,
                                  s_.attended + (size_t)task.first_row * m_.attended + first_head, m_.joined, m_.attended,
                                  task.rows, queries_, position(task.first_row), m_.layer_windows[layer],
                                  m_.pages(layer, task.kv_head), m_.page_stride(),
                                  b_.block_tables + b_.table_starts[task.sequence],
                                  m_.shape.attention_scale, m_.shape.attention_soft_cap, s_.attention(worker)});
}

void Step::narrow_attended(Range rows) {
  for (int row = rows.first; row < rows.end; row++) k_.inputs[m_.format](s_.attended + (size_t)row * m_.attended, s_.heads, row);
}

void Step::project(const Layer& layer, Range rows, Range panels) { add_product(layer.out, s_.heads, rows, panels); }

void Step::add_block(const float* norm, Range rows) {
  for (int row = rows.first; row < rows.end; row++) {
    const size_t at = (size_t)row * m_.hidden;
    k_.add_normed(s_.block + at, norm, m_.shape.norm_eps, m_.shape.hidden_size, m_.hidden, s_.residual + at);
  }
}

void Step::feed(const Layer& layer, Range rows, Range pairs) {
  alignas(64) float gates[kBlockRows * kPanelMax];
  multiply(layer.gate_up, s_.narrow, rows, {2 * pairs.first, 2 * pairs.end}, [&](int panel, int row, int n, const float* out) {
    if (panel % 2 == 0) {
      std::copy(out, out + n * width_, gates);
    } else {
      k_.gate[m_.shape.activation](gates, out, bias(layer.gate_up, panel - 1), bias(layer.gate_up, panel), n,
              s_.fed + (size_t)row * m_.intermediate + panel / 2 * width_, m_.intermediate);
    }
  });
}

void Step::narrow_fed(Range rows) {
  for (int row = rows.first; row < rows.end; row++) k_.inputs[m_.format](s_.fed + (size_t)row * m_.intermediate, s_.wide, row);
}

void Step::unfeed(const Layer& layer, Range rows, Range panels) { add_product(layer.down, s_.wide, rows, panels); }

// Onto the residual; under sandwich norms aside, until the row is complete and can be normalised.
void Step::add_product(const Linear& linear, const Rows& inputs, Range rows, Range panels) {
  float* to = m_.shape.sandwich_norms ? s_.block : s_.residual;
  const auto finish = m_.shape.sandwich_norms ? k_.store : k_.add;
  multiply(linear, inputs, rows, panels, [&](int panel, int row, int n, const float* out) {
    finish(out, bias(linear, panel), n, to + (size_t)row * m_.hidden + panel * width_, m_.hidden);
  });
}

// Calls finish(panel, first row, rows, their part of the product) for blocks of rows, panel after panel.
template <class Finish>
void Step::multiply(const Linear& linear, const Rows& inputs, Range rows, Range panels, Finish&& finish) {
  alignas(64) float out[kBlockRows * kPanelMax];
  for (int row = rows.first; row < rows.end; row += kBlockRows) {
    const int n = std::min(kBlockRows, rows.end - row);
    for (int panel = panels.first; panel < panels.end; panel++) {
      k_.product[linear.format](inputs, row, n, linear.panels + panel * linear.bytes, out);
      finish(panel, row, n, out);
    }
  }
}

template <class Task>
void Step::each_row(Task&& task) {
  if (b_.rows <= 2) {
    for (int row = 0; row < b_.rows; row++) task(row);
  } else {
    pool_.each(b_.rows, [&](int row, int) { task(row); });
  }
}

template <class Task>
void Step::each_part(int panels, Task&& task) {
  const int parts = std::min(panels, kTasksPerThread * pool_.threads());
  pool_.each(parts, [&](int part, int) {
    task(Range{(int)((int64_t)panels * part / parts), (int)((int64_t)panels * (part + 1) / parts)});
  });
}

}  // namespace tailrace
