// A model as the step driver needs it: sizes, packed weights in one piece of memory, and the cache.
#pragma once
#include <string>
#include <vector>

#include "formats.h"
#include "memory.h"
#include "packing.h"
#include "tailrace_cpu.h"

namespace tailrace {

// A weight matrix cut into panels. `bias` holds zeros where the model has none, and is null where no layer of its kind has.
struct Linear {
  Format format;
  uint8_t* panels;
  float* bias;
  int inputs, outputs;
  int count;     // panels
  size_t bytes;  // of one panel
};

struct Layer {
  float *attention_norm, *query_norm, *key_norm, *out_norm, *feed_forward_norm, *feed_forward_out_norm;
  Linear qkv, out, gate_up, down;  // gate_up: a panel of gate, one of up, and so on
};

class Model {
 public:
  // Throws std::invalid_argument for sizes that can't be computed.
  Model(const tailrace_shape& shape, const Kernels& kernels);

  // Takes a matrix or vector, row after row. Throws std::invalid_argument when it doesn't fit.
  void put(tailrace_part part, int layer, const Numbers& numbers, int64_t count);

  uint8_t* pages(int layer, int kv_head) const {
    return cache_.data() + ((size_t)layer * shape.kv_heads + kv_head) * kv.bytes;
  }
  // All layers of a block lie together: the cache takes memory as blocks are used, not a huge page per layer at once.
  size_t page_stride() const { return (size_t)shape.layers * shape.kv_heads * kv.bytes; }
  void embed(int token, float* to) const;

  const tailrace_shape shape;
  const Kernels& kernels;
  const Format format, kv_format;  // of the layers; the head may have another
  const KvLayout kv;
  const int hidden, intermediate, attended, joined;  // widths of a row, padded: residual, feed-forward, heads, q|k|v
  const std::vector<float> frequencies, gains;  // of each way of turning
  const std::vector<int> layer_ropes, layer_windows;
  std::vector<Layer> layers;
  float* final_norm = nullptr;
  Linear head{};
  size_t weight_bytes() const { return weights_.bytes(); }

 private:
  void lay_out(Cursor& cursor);
  Linear linear(Cursor& cursor, Format format, int inputs, int outputs, bool bias);
  // Where a part goes: into every `every`th panel of a matrix or a bias, from panel `first` on.
  struct Place {
    Linear* linear;
    float* vector;
    int outputs;
    int every = 1, first = 0;
  };
  static Place matrix(Linear& linear, int outputs, int every = 1, int first = 0) {
    return {&linear, nullptr, outputs, every, first};
  }
  static Place bias(Linear& linear, int outputs, int every = 1, int first = 0) {
    return {nullptr, linear.bias, outputs, every, first};
  }
  Place place_of(tailrace_part part, int layer);
  void put_embedding(const Numbers& numbers, int64_t count);

  uint16_t* embedding_ = nullptr;  // bf16
  float* exact_embedding_ = nullptr;
  Mapping weights_, cache_;
};

}  // namespace tailrace
