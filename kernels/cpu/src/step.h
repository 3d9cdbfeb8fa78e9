// One step of a model over a mixed batch.
#pragma once
#include "model.h"
#include "pool.h"

namespace tailrace {

// Memory for the rows of a step; grows to the largest step there was.
class Scratch {
 public:
  Scratch(const Model& model, int threads);
  void reserve(int rows, int wanted);
  uint8_t* attention(int worker) const { return attention_.data() + worker * attention_bytes_; }

  float *residual = nullptr, *joined = nullptr, *attended = nullptr, *fed = nullptr;  // (rows, width in Model)
  float* block = nullptr;  // a block's output before its norm, under sandwich norms
  float *cosines = nullptr, *sines = nullptr;  // (ropes, rows of the step, head_dim / 2)
  // Inputs of products: a layer's (of hidden_size, of all heads, of intermediate_size), and the head's.
  Rows narrow{}, heads{}, wide{}, last{};

 private:
  void lay_out(Cursor& cursor, size_t rows, size_t wanted);

  const Model& model_;
  int rows_ = 0, wanted_ = 0;
  size_t attention_bytes_;
  Mapping memory_, attention_;
};

// Computes one batch.
//
// With few rows the threads share each product's columns. With many, each takes blocks of rows through all products of
// a layer, and what it computes stays in its own cache.
class Step {
 public:
  Step(const Model& model, Scratch& scratch, Pool& pool, const tailrace_batch& batch);
  void run();

 private:
  struct AttentionTask {
    int sequence, kv_head, first_row, rows;
  };
  struct Range {
    int first, end;
  };

  void plan_attention();
  void by_columns();
  void by_rows();
  void head();

  // What a layer consists of, for a range of rows and, where it is a product, of panels.
  void embed(int row);
  void norm(const float* weight, Range rows);
  void join(const Layer& layer, Range rows, Range panels);
  void place(int layer, int row);
  void place_head(int layer, int row, int kv_head);
  void attend(int layer, const AttentionTask& task, int worker);
  void narrow_attended(Range rows);
  void project(const Layer& layer, Range rows, Range panels);
  void add_block(const float* norm, Range rows);
  void feed(const Layer& layer, Range rows, Range pairs);
  void narrow_fed(Range rows);
  void unfeed(const Layer& layer, Range rows, Range panels);
  void add_product(const Linear& linear, const Rows& inputs, Range rows, Range panels);

  // All of it, by all threads.
  void attend_all(int layer);
  template <class Task>
  void each_row(Task&& task);
  template <class Task>
  void each_part(int panels, Task&& task);

  template <class Finish>
  void multiply(const Linear& linear, const Rows& inputs, Range rows, Range panels, Finish&& finish);
  const float* bias(const Linear& linear, int panel) const { return linear.bias ? linear.bias + panel * width_ : nullptr; }
  size_t angles_at(int rope, int row) const { return ((size_t)rope * b_.rows + row) * m_.shape.head_dim / 2; }
  int position(int row) const { return b_.first_positions[sequence_[row]] + row - b_.row_starts[sequence_[row]]; }

  const Model& m_;
  const Kernels& k_;
  Scratch& s_;
  Pool& pool_;
  const tailrace_batch& b_;
  const int queries_;  // heads that share a KV head
  const int width_;    // of a panel
  bool placed_ = false;
  std::vector<int> sequence_;  // of each row
  std::vector<AttentionTask> attention_;
};

}  // namespace tailrace
