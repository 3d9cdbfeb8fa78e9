// Single operations behind the C interface, each as a step uses it, for tests and measurements.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "guarded.h"
#include "packing.h"
#include "tailrace_cpu.h"

using namespace tailrace;

int tailrace_product(const char* name, tailrace_format given, const float* x, int rows, const float* weight, int inputs,
                     int outputs, float* out, int repeats) {
  return guarded([&] {
    const Kernels& kernels = kernels_named(name);
    if (given < 0 || given >= (int)kFormats) throw std::invalid_argument("there is no such format");
    const Format format = (Format)given;
    const int columns = round_up(inputs, kGroup), width = 2 * kernels.lanes;
    std::vector<float> values((size_t)rows * columns), padded(columns), tile((size_t)rows * width);
    std::vector<float> scales(values.size() / kGroup), middles(scales.size()), totals(scales.size());
    std::vector<int16_t> q(values.size());
    std::vector<int8_t> bytes(values.size());
    Rows taken{values.data(), q.data(), bytes.data(), scales.data(), middles.data(), totals.data(), columns};
    for (int row = 0; row < rows; row++) {
      std::copy(x + (size_t)row * inputs, x + (size_t)(row + 1) * inputs, padded.begin());
      kernels.inputs[format](padded.data(), taken, row);
    }
    std::vector<uint8_t> panel(panel_bytes(format, inputs, kernels.lanes) + 64);
    uint8_t* aligned = panel.data() + (64 - (uintptr_t)panel.data() % 64) % 64;
    for (int first = 0; first < outputs; first += width) {
      pack_panel(format, kernels.lanes, {weight, kFp32}, inputs, outputs, first, aligned);
      for (int repeat = 0; repeat < repeats; repeat++) kernels.product[format](taken, 0, rows, aligned, tile.data());
      for (int row = 0; row < rows; row++)
        for (int c = 0; c < width && first + c < outputs; c++) out[(size_t)row * outputs + first + c] = tile[row * width + c];
    }
  });
}

int tailrace_rms_norm(const char* name, const float* x, const float* weight, float eps, int rows, int columns, float* out) {
  return guarded([&] {
    const Kernels& kernels = kernels_named(name);
    const int padded = round_up(columns, kGroup);
    std::vector<float> values(padded), row_in(padded), weights(padded);
    std::copy(weight, weight + columns, weights.begin());
    Rows taken{};
    taken.values = values.data(), taken.columns = padded;
    for (int row = 0; row < rows; row++) {
      std::copy(x + (size_t)row * columns, x + (size_t)(row + 1) * columns, row_in.begin());
      kernels.normed_inputs[kFp32](row_in.data(), weights.data(), eps, columns, taken, 0);
      std::copy(values.begin(), values.begin() + columns, out + (size_t)row * columns);
    }
  });
}

int tailrace_gate(const char* name, tailrace_activation activation, const float* gate, const float* up, int count, float* out) {
  return guarded([&] {
    const Kernels& kernels = kernels_named(name);
    const int width = 2 * kernels.lanes;
    std::vector<float> gates(round_up(count, width)), ups(gates.size()), joined(gates.size());
    std::copy(gate, gate + count, gates.begin());
    std::copy(up, up + count, ups.begin());
    kernels.gate[activation](gates.data(), ups.data(), nullptr, nullptr, (int)gates.size() / width, joined.data(), width);
    std::copy(joined.begin(), joined.begin() + count, out);
  });
}

int tailrace_largest(const char* name, const float* x, int count, int32_t* where, float* value) {
  return guarded([&] { *value = kernels_named(name).largest(x, count, where); });
}

namespace {

// One KV head's pages, written position after position. Neighbours don't lie side by side, as in a pool that was used.
class Pages {
 public:
  Pages(const Kernels& kernels, Format format, const tailrace_attention_sizes& sizes)
      : kv(kernels.kv_layout[format](sizes.block_size, sizes.head_dim)), kernels_(kernels), format_(format), sizes_(sizes) {
    const int blocks = (sizes.known + sizes.block_size - 1) / sizes.block_size;
    for (int i = 0; i < blocks; i++) table.push_back(blocks - 1 - i);
    bytes_.resize(blocks * kv.bytes + 64);
  }

  const KvLayout kv;
  std::vector<int32_t> table;

  uint8_t* data() { return bytes_.data() + (64 - (uintptr_t)bytes_.data() % 64) % 64; }

  // Unturned: every angle is 0.
  void put(int position, const float* key, const float* value) {
    const std::vector<float> cosines(sizes_.head_dim / 2, 1.0f), sines(sizes_.head_dim / 2, 0.0f);
    std::vector<float> turned(key, key + sizes_.head_dim);
    kernels_.place[format_](kv, {nullptr, 0, turned.data(), value, cosines.data(), sines.data(), nullptr, nullptr, 0.0f,
                                 data() + table[position / sizes_.block_size] * kv.bytes, position % sizes_.block_size});
  }

 private:
  const Kernels& kernels_;
  const Format format_;
  const tailrace_attention_sizes& sizes_;
  std::vector<uint8_t> bytes_;
};

}  // namespace

int tailrace_attention(const char* name, tailrace_format given, const tailrace_attention_sizes* sizes, const float* query,
                       const float* keys, const float* values, float* out) {
  return guarded([&] {
    if (given < 0 || given >= (int)kKvFormats) throw std::invalid_argument("keys and values must be fp32 or int8");
    const Kernels& kernels = kernels_named(name);
    const Format format = (Format)given;
    const tailrace_attention_sizes& s = *sizes;
    const int queries = s.heads / s.kv_heads, most = std::max(1, kAttentionRows / queries);
    const ptrdiff_t stride = (ptrdiff_t)s.heads * s.head_dim;
    for (int kv_head = 0; kv_head < s.kv_heads; kv_head++) {
      Pages pages(kernels, format, s);
      for (int position = 0; position < s.known; position++) {
        const size_t at = ((size_t)position * s.kv_heads + kv_head) * s.head_dim;
        pages.put(position, keys + at, values + at);
      }
      std::vector<uint8_t> scratch(kernels.attention_scratch[format](pages.kv, std::max(kAttentionRows, queries)) + 64);
      uint8_t* aligned = scratch.data() + (64 - (uintptr_t)scratch.data() % 64) % 64;
      for (int row = 0; row < s.rows; row += most) {
        const size_t at = row * stride + (size_t)kv_head * queries * s.head_dim;
        kernels.attend[format](pages.kv, {query + at, out + at, stride, stride, std::min(most, s.rows - row), queries,
                                          s.known - s.rows + row, s.window, pages.data(), pages.kv.bytes, pages.table.data(),
                                          s.scale, s.soft_cap, aligned});
      }
    }
  });
}
