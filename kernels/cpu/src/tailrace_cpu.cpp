#include "tailrace_cpu.h"

#include <stdexcept>

#include "guarded.h"
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

int tailrace_put(tailrace_engine* engine, tailrace_part part, int layer, const void* numbers, tailrace_format given,
                 int64_t count) {
  return guarded([&] {
    if (given != TAILRACE_FP32 && given != TAILRACE_BF16) throw std::invalid_argument("numbers must be fp32 or bf16");
    engine->model.put(part, layer, {numbers, (Format)given}, count);
  });
}

int64_t tailrace_weight_bytes(const tailrace_engine* engine) { return (int64_t)engine->model.weight_bytes(); }

int64_t tailrace_page_bytes(const char* kernels, tailrace_format format, int block_size, int head_dim) {
  int64_t bytes = -1;
  guarded([&] {
    if (format < 0 || format >= (int)kKvFormats) throw std::invalid_argument("keys and values must be fp32 or int8");
    bytes = (int64_t)kernels_named(kernels).kv_layout[format](block_size, head_dim).bytes;
  });
  return bytes;
}

int32_t tailrace_logits_stride(const tailrace_engine* engine) { return round_up(engine->model.shape.vocab_size, kGroup); }

int tailrace_step(tailrace_engine* engine, const tailrace_batch* batch) {
  return guarded([&] {
    check(engine->model.shape, *batch);
    Step(engine->model, engine->scratch, engine->pool, *batch).run();
  });
}
