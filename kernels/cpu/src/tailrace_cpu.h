// The C interface of the CPU's step library. Every function that can fail returns 0 or -1, and -1 leaves a message.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Keys and values have the first two alone. With int4 the head keeps 8 bits.
typedef enum { TAILRACE_FP32 = 0, TAILRACE_INT8 = 1, TAILRACE_BF16 = 2, TAILRACE_INT4 = 3 } tailrace_format;

typedef enum { TAILRACE_SILU = 0, TAILRACE_GELU_TANH = 1 } tailrace_activation;

typedef struct {
  int32_t vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim;
  int32_t weights_format, kv_format;  // tailrace_format
  int32_t blocks, block_size;         // of the cache
  int32_t qkv_bias, attention_out_bias, mlp_bias, qk_norm, sandwich_norms;  // 0 or 1: which parts there are
  int32_t activation;                // tailrace_activation
  int32_t ropes;                     // how many ways of turning there are
  float norm_eps, attention_scale, embedding_scale;
  float attention_soft_cap, logit_soft_cap;  // 0: none
  const float* rope_frequencies;     // (ropes, head_dim / 2) angles per position
  const float* rope_gains;           // (ropes,) by what cosines and sines grow
  const int32_t* layer_ropes;        // (layers,) which of them each layer turns by
  const int32_t* layer_windows;      // (layers,) positions that a row sees, its own included; 0: all
} tailrace_shape;

// Matrices are (outputs, inputs). QKV joins the rows of queries, keys and values.
typedef enum {
  TAILRACE_EMBEDDING, TAILRACE_FINAL_NORM, TAILRACE_HEAD,
  TAILRACE_ATTENTION_NORM, TAILRACE_QKV, TAILRACE_QKV_BIAS, TAILRACE_QUERY_NORM, TAILRACE_KEY_NORM,
  TAILRACE_ATTENTION_OUT, TAILRACE_ATTENTION_OUT_BIAS, TAILRACE_ATTENTION_OUT_NORM, TAILRACE_FEED_FORWARD_NORM,
  TAILRACE_GATE, TAILRACE_GATE_BIAS, TAILRACE_UP, TAILRACE_UP_BIAS, TAILRACE_DOWN, TAILRACE_DOWN_BIAS,
  TAILRACE_FEED_FORWARD_OUT_NORM
} tailrace_part;

// One step: rows lie sequence after sequence. Sequence s has the rows row_starts[s] to row_starts[s + 1], at positions
// from first_positions[s] on, in the blocks block_tables[table_starts[s]] and following.
typedef struct {
  int32_t rows, sequences, wanted;
  const int32_t* tokens;
  const int32_t* row_starts;
  const int32_t* first_positions;
  const int32_t* table_starts;
  const int32_t* block_tables;
  const int32_t* wanted_rows;  // whose logits are asked for
  float* logits;               // (wanted, logits_stride)
  int32_t* best_tokens;        // (wanted,) the first largest logit of each
  float* best_logits;          // (wanted,) NaN where a logit is
} tailrace_batch;

typedef struct tailrace_engine tailrace_engine;

const char* tailrace_last_error(void);
// The fastest instruction set that this CPU has; `tailrace_has` tells of the others by name.
const char* tailrace_best_kernels(void);
int tailrace_has(const char* kernels);

// What a block of the cache takes per layer and KV head; -1 without such kernels.
int64_t tailrace_page_bytes(const char* kernels, tailrace_format format, int block_size, int head_dim);

tailrace_engine* tailrace_open(const tailrace_shape* shape, const char* kernels, int threads);
void tailrace_close(tailrace_engine* engine);
// `numbers` are fp32 or bf16, as `given` says, whatever the weights are packed as.
int tailrace_put(tailrace_engine* engine, tailrace_part part, int layer, const void* numbers, tailrace_format given,
                 int64_t count);
int64_t tailrace_weight_bytes(const tailrace_engine* engine);
int32_t tailrace_logits_stride(const tailrace_engine* engine);
int tailrace_step(tailrace_engine* engine, const tailrace_batch* batch);

// Single operations, for tests and measurements.
int tailrace_product(const char* kernels, tailrace_format format, const float* x, int rows, const float* weight, int inputs,
                     int outputs, float* out, int repeats);
int tailrace_rms_norm(const char* kernels, const float* x, const float* weight, float eps, int rows, int columns, float* out);
int tailrace_gate(const char* kernels, tailrace_activation activation, const float* gate, const float* up, int count, float* out);
int tailrace_largest(const char* kernels, const float* x, int count, int32_t* where, float* value);

// A sequence of `known` positions, the last `rows` of which attend to what they see.
typedef struct {
  int32_t known, rows, heads, kv_heads, head_dim, block_size;
  int32_t window;        // as in tailrace_shape
  float scale, soft_cap;
} tailrace_attention_sizes;

// query and out (rows, heads, head_dim), keys and values (known, kv_heads, head_dim)
int tailrace_attention(const char* kernels, tailrace_format format, const tailrace_attention_sizes* sizes, const float* query,
                       const float* keys, const float* values, float* out);

#ifdef __cplusplus
}
#endif
