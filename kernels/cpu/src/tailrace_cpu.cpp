#include "tailrace_cpu.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "packing.h"
#include "step.h"

using namespace tailrace;

struct tailrace_engine {
  tailrace_engine(const tailrace_shape& shape, const Kernels& kernels, int threads)
      : model(shape, kernels), scratch(model, threads), pool(threads) {}

  Model model;
  Scratch scratch;
  Pool pool;
};

namespace {

thread_local std::string last_error;

template <class Work>
int guarded(Work&& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return -1;
}

const Kernels& kernels_named(const char* name) {
  const Kernels* kernels = find_kernels(name);
  if (!kernels) throw std::invalid_argument(std::string("this CPU or this build has no kernels ") + name);
  return *kernels;
}

// A caller's mistake here would read or write memory of somebody else.
void check(const tailrace_shape& shape, const tailrace_batch& batch) {
  const auto require = [](bool ok, const char* message) {
    if (!ok) throw std::invalid_argument(message);
  };
  require(batch.rows >= 1 && batch.sequences >= 1 && batch.row_starts[0] == 0 && batch.row_starts[batch.sequences] == batch.rows,
          "row_starts must go from 0 to rows");
  for (int s = 0; s < batch.sequences; s++) {
    const int64_t rows = (int64_t)batch.row_starts[s + 1] - batch.row_starts[s];
    require(rows >= 1, "every sequence must have a row");
    const int64_t blocks = ((int64_t)batch.first_positions[s] + rows + shape.block_size - 1) / shape.block_size;
    require(batch.first_positions[s] >= 0 && batch.table_starts[s + 1] - batch.table_starts[s] >= blocks,
            "a block table is shorter than its sequence");
    for (int64_t i = 0; i < blocks; i++) {
      const int block = batch.block_tables[batch.table_starts[s] + i];
      require(block >= 0 && block < shape.blocks, "a block table names a block that isn't there");
    }
  }
  for (int row = 0; row < batch.rows; row++)
    require(batch.tokens[row] >= 0 && batch.tokens[row] < shape.vocab_size, "a token is out of the vocabulary");
  for (int i = 0; i < batch.wanted; i++)
    require(batch.wanted_rows[i] >= 0 && batch.wanted_rows[i] < batch.rows, "a wanted row isn't in the batch");
}

}  // namespace

const char* tailrace_last_error(void) { return last_error.c_str(); }
const char* tailrace_best_kernels(void) { return find_kernels("")->name; }
int tailrace_has(const char* kernels) { return find_kernels(kernels) != nullptr; }

tailrace_engine* tailrace_open(const tailrace_shape* shape, const char* kernels, int threads) {
  tailrace_engine* engine = nullptr;
  guarded([&] {
    if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be 1 to 1024");
    engine = new tailrace_engine(*shape, kernels_named(kernels), threads);
  });
  return engine;
}

void tailrace_close(tailrace_engine* engine) { delete engine; }

int tailrace_put(tailrace_engine* engine, tailrace_part part, int layer, const float* numbers, int64_t count) {
  return guarded([&] { engine->model.put(part, layer, numbers, count); });
}

int64_t tailrace_weight_bytes(const tailrace_engine* engine) { return (int64_t)engine->model.weight_bytes(); }

int64_t tailrace_page_bytes(const char* kernels, tailrace_format format, int block_size, int head_dim) {
  int64_t bytes = -1;
  guarded([&] { bytes = (int64_t)kernels_named(kernels).kv_layout[format](block_size, head_dim).bytes; });
  return bytes;
}

int32_t tailrace_logits_stride(const tailrace_engine* engine) { return round_up(engine->model.shape.vocab_size, kGroup); }

int tailrace_step(tailrace_engine* engine, const tailrace_batch* batch) {
  return guarded([&] {
    check(engine->model.shape, *batch);
    Step(engine->model, engine->scratch, engine->pool, *batch).run();
  });
}

int tailrace_product(const char* name, tailrace_format given, const float* x, int rows, const float* weight, int inputs,
                     int outputs, float* out, int repeats) {
  return guarded([&] {
    const Kernels& kernels = kernels_named(name);
    const Format format = (Format)given;
    const int columns = round_up(inputs, kGroup), width = 2 * kernels.lanes;
    std::vector<float> values((size_t)rows * columns), scales(values.size() / kGroup), padded(columns), tile((size_t)rows * width);
    std::vector<int16_t> q(values.size());
    Rows taken{values.data(), q.data(), scales.data(), columns};
    for (int row = 0; row < rows; row++) {
      std::copy(x + (size_t)row * inputs, x + (size_t)(row + 1) * inputs, padded.begin());
      kernels.inputs[format](padded.data(), taken, row);
    }
    std::vector<uint8_t> panel(panel_bytes(format, inputs, kernels.lanes) + 64);
    uint8_t* aligned = panel.data() + (64 - (uintptr_t)panel.data() % 64) % 64;
    for (int first = 0; first < outputs; first += width) {
      pack_panel(format, kernels.lanes, weight, inputs, outputs, first, aligned);
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
    Rows taken{values.data(), nullptr, nullptr, padded};
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
