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

// A row of the table for both formats.
#define TAILRACE_BOTH(FUNCTION, FP32, INT8) {FUNCTION<FP32>, FUNCTION<INT8>}

#define TAILRACE_KERNELS(NAME)                                                          \
  {                                                                                     \
    NAME, kLanes,                                                                       \
    TAILRACE_BOTH(product, Fp32Product, Int8Product),                                   \
    TAILRACE_BOTH(inputs, Fp32Inputs, Int8Inputs),                                      \
    TAILRACE_BOTH(normed_inputs, Fp32Inputs, Int8Inputs),                               \
    store_panel, add_panel, {gate_panel<Silu>, gate_panel<GeluTanh>}, add_normed,       \
    TAILRACE_BOTH(kv_layout, Fp32Step, Int8Step),                                       \
    TAILRACE_BOTH(place, Fp32Step, Int8Step),                                           \
    TAILRACE_BOTH(attention_scratch, Fp32Step, Int8Step),                               \
    TAILRACE_BOTH(attend, Fp32Step, Int8Step),                                          \
    soft_cap, largest_of                                                                \
  }
