#include "model.h"

#include <cstring>
#include <stdexcept>

namespace tailrace {
namespace {

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

const tailrace_shape& checked(const tailrace_shape& s) {
  const struct {
    const char* name;
    int32_t value, most;
  } sizes[] = {
      {"vocab_size", s.vocab_size, 1 << 24}, {"hidden_size", s.hidden_size, 1 << 20},
      {"intermediate_size", s.intermediate_size, 1 << 22}, {"layers", s.layers, 1 << 12},
      {"heads", s.heads, 1 << 12}, {"kv_heads", s.kv_heads, 1 << 12}, {"head_dim", s.head_dim, kHeadMax},
      {"blocks", s.blocks, INT32_MAX}, {"block_size", s.block_size, kBlockMax},
      {"ropes", s.ropes, 16},
  };
  for (const auto& size : sizes)
    require(size.value >= 1 && size.value <= size.most,
            std::string(size.name) + " is " + std::to_string(size.value) + "; it must be 1 to " + std::to_string(size.most));
  require(s.heads % s.kv_heads == 0, "heads must be a multiple of kv_heads");
  require(s.head_dim % 2 == 0, "head_dim must be even");
  for (int layer = 0; layer < s.layers; layer++) {
    require(s.layer_ropes[layer] >= 0 && s.layer_ropes[layer] < s.ropes, "a layer turns by a rope that isn't there");
    require(s.layer_windows[layer] >= 0, "a window must be 0 or more");
  }
  require(s.activation >= 0 && s.activation < kActivations, "there is no activation " + std::to_string(s.activation));
  require(s.weights_format >= 0 && s.weights_format < kFormats, "there is no format " + std::to_string(s.weights_format));
  require(s.kv_format >= 0 && s.kv_format < kKvFormats, "keys and values have no format " + std::to_string(s.kv_format));
  return s;
}

}  // namespace

Model::Model(const tailrace_shape& given, const Kernels& chosen)
    : shape(checked(given)),
      kernels(chosen),
      format((Format)shape.weights_format),
      kv_format((Format)shape.kv_format),
      kv(kernels.kv_layout[kv_format](shape.block_size, shape.head_dim)),
      hidden(round_up(shape.hidden_size, kGroup)),
      intermediate(round_up(shape.intermediate_size, kGroup)),
      attended(round_up(shape.heads * shape.head_dim, kGroup)),
      joined(round_up((shape.heads + 2 * shape.kv_heads) * shape.head_dim, kGroup)),
      frequencies(shape.rope_frequencies, shape.rope_frequencies + shape.ropes * shape.head_dim / 2),
      gains(shape.rope_gains, shape.rope_gains + shape.ropes),
      layer_ropes(shape.layer_ropes, shape.layer_ropes + shape.layers),
      layer_windows(shape.layer_windows, shape.layer_windows + shape.layers),
      layers(shape.layers),
      cache_((size_t)shape.layers * shape.blocks * shape.kv_heads * kv.bytes) {
  Cursor counting(nullptr);
  lay_out(counting);
  weights_ = Mapping(counting.used());
  Cursor cursor(weights_.data());
  lay_out(cursor);
}

void Model::lay_out(Cursor& cursor) {
  const int head = shape.head_dim;
  const size_t embedded = (size_t)shape.vocab_size * shape.hidden_size;
  if (format == kFp32) exact_embedding_ = cursor.take<float>(embedded);
  else embedding_ = cursor.take<uint16_t>(embedded);
  const auto vector = [&](int size, bool present) { return present ? cursor.take<float>(size) : nullptr; };
  for (Layer& layer : layers) {
    layer.attention_norm = vector(hidden, true);
    layer.qkv = linear(cursor, format, shape.hidden_size, (shape.heads + 2 * shape.kv_heads) * head, shape.qkv_bias);
    layer.query_norm = vector(head, shape.qk_norm);
    layer.key_norm = vector(head, shape.qk_norm);
    layer.out = linear(cursor, format, shape.heads * head, shape.hidden_size, shape.attention_out_bias);
    layer.out_norm = vector(hidden, shape.sandwich_norms);
    layer.feed_forward_norm = vector(hidden, true);
    layer.gate_up = linear(cursor, format, shape.hidden_size, 2 * intermediate, shape.mlp_bias);
    layer.down = linear(cursor, format, shape.intermediate_size, shape.hidden_size, shape.mlp_bias);
    layer.feed_forward_out_norm = vector(hidden, shape.sandwich_norms);
  }
  final_norm = cursor.take<float>(hidden);
  // Each error of the head is an error of a logit: it keeps 8 bits.
  this->head = linear(cursor, format == kInt4 ? kInt8 : format, shape.hidden_size, shape.vocab_size, false);
}

Linear Model::linear(Cursor& cursor, Format stored, int inputs, int outputs, bool bias) {
  const int width = 2 * kernels.lanes;
  Linear linear{stored, nullptr, nullptr, inputs, outputs, round_up(outputs, width) / width, panel_bytes(stored, inputs, kernels.lanes)};
  linear.panels = cursor.take<uint8_t>(linear.count * linear.bytes);
  if (bias) linear.bias = cursor.take<float>(linear.count * width);
  return linear;
}

Model::Place Model::place_of(tailrace_part part, int layer_number) {
  Layer& layer = layers[layer_number];
  const int inner = shape.intermediate_size, hidden_size = shape.hidden_size, head_dim = shape.head_dim;
  switch (part) {
    case TAILRACE_HEAD: return matrix(head, shape.vocab_size);
    case TAILRACE_QKV: return matrix(layer.qkv, layer.qkv.outputs);
    case TAILRACE_ATTENTION_OUT: return matrix(layer.out, hidden_size);
    case TAILRACE_GATE: return matrix(layer.gate_up, inner, 2, 0);
    case TAILRACE_UP: return matrix(layer.gate_up, inner, 2, 1);
    case TAILRACE_DOWN: return matrix(layer.down, hidden_size);
    case TAILRACE_QKV_BIAS: return bias(layer.qkv, layer.qkv.outputs);
    case TAILRACE_ATTENTION_OUT_BIAS: return bias(layer.out, hidden_size);
    case TAILRACE_GATE_BIAS: return bias(layer.gate_up, inner, 2, 0);
    case TAILRACE_UP_BIAS: return bias(layer.gate_up, inner, 2, 1);
    case TAILRACE_DOWN_BIAS: return bias(layer.down, hidden_size);
    case TAILRACE_FINAL_NORM: return {nullptr, final_norm, hidden_size};
    case TAILRACE_ATTENTION_NORM: return {nullptr, layer.attention_norm, hidden_size};
    case TAILRACE_ATTENTION_OUT_NORM: return {nullptr, layer.out_norm, hidden_size};
    case TAILRACE_FEED_FORWARD_NORM: return {nullptr, layer.feed_forward_norm, hidden_size};
    case TAILRACE_FEED_FORWARD_OUT_NORM: return {nullptr, layer.feed_forward_out_norm, hidden_size};
    case TAILRACE_QUERY_NORM: return {nullptr, layer.query_norm, head_dim};
    case TAILRACE_KEY_NORM: return {nullptr, layer.key_norm, head_dim};
    case TAILRACE_EMBEDDING: break;
  }
  return {nullptr, nullptr, 0};
}

void Model::put(tailrace_part part, int layer, const Numbers& numbers, int64_t count) {
  require(layer >= 0 && layer < shape.layers, "there is no layer " + std::to_string(layer));
  if (part == TAILRACE_EMBEDDING) return put_embedding(numbers, count);
  const Place place = place_of(part, layer);
  require(place.linear || place.vector, "the shape says that there is no part " + std::to_string(part));
  const int64_t expected = (int64_t)place.outputs * (place.linear ? place.linear->inputs : 1);
  require(count == expected, "part " + std::to_string(part) + " holds " + std::to_string(count) +
                                 " numbers; its shape says " + std::to_string(expected));
  const int width = 2 * kernels.lanes;
  if (place.vector) {
    for (int i = 0; i < place.outputs; i++)
      place.vector[(i / width * place.every + place.first) * width + i % width] = numbers[i];
    return;
  }
  for (int panel = 0; panel * width < place.outputs; panel++)
    pack_panel(place.linear->format, kernels.lanes, numbers, place.linear->inputs, place.outputs, panel * width,
               place.linear->panels + (panel * place.every + place.first) * place.linear->bytes);
}

void Model::put_embedding(const Numbers& numbers, int64_t count) {
  require(count == (int64_t)shape.vocab_size * shape.hidden_size, "the embedding doesn't have the shape's size");
  for (int64_t i = 0; i < count; i++) {
    if (exact_embedding_) exact_embedding_[i] = numbers[i];
    else embedding_[i] = to_bf16(numbers[i]);
  }
}

void Model::embed(int token, float* to) const {
  const size_t first = (size_t)token * shape.hidden_size;
  for (int i = 0; i < hidden; i++)
    to[i] = i >= shape.hidden_size ? 0.0f : shape.embedding_scale * (exact_embedding_ ? exact_embedding_[first + i] : from_bf16(embedding_[first + i]));
}

}  // namespace tailrace
