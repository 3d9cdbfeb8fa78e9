// The table of kernels for one instruction set; included by one source file each, after the set's primitives.
// Everything here lies in unnamed namespaces: the same names mean other code in the next file, and no function of the
// standard library that another file might share may be compiled with this file's instructions.
#pragma once
#include "formats.h"
#include "simd/math.h"
// These build on each other in this order.
#include "dots.h"
#include "product.h"
#include "inputs.h"
#include "cache.h"
#include "attention.h"

// Rows of the table: for the formats of keys and values, and for those of weights.
#define TAILRACE_KV(FUNCTION) {FUNCTION<Fp32Step>, FUNCTION<Int8Step>}
#define TAILRACE_WEIGHTS(FUNCTION, FP32, INT8, BF16, INT4) {FUNCTION<FP32>, FUNCTION<INT8>, FUNCTION<BF16>, FUNCTION<INT4>}
#define TAILRACE_PRODUCTS {float_product<Fp32Step>, int8_product, float_product<Bf16Step>, int4_product}

#define TAILRACE_KERNELS(NAME)                                                             \
  {                                                                                        \
    NAME, kLanes,                                                                          \
    TAILRACE_PRODUCTS,                                                                     \
    TAILRACE_WEIGHTS(inputs, Fp32Inputs, Int8Inputs, Fp32Inputs, Int4Inputs),              \
    TAILRACE_WEIGHTS(normed_inputs, Fp32Inputs, Int8Inputs, Fp32Inputs, Int4Inputs),       \
    store_panel, add_panel, {gate_panel<Silu>, gate_panel<GeluTanh>}, add_normed,          \
    TAILRACE_KV(kv_layout), TAILRACE_KV(place),                                            \
    TAILRACE_KV(attention_scratch), TAILRACE_KV(attend),                                   \
    soft_cap, largest_of                                                                   \
  }
