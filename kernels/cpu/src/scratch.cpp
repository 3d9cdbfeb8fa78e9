#include <algorithm>

#include "step.h"

namespace tailrace {
namespace {

Rows take_rows(Cursor& cursor, Format format, size_t rows, int columns) {
  Rows taken{};
  taken.columns = columns;
  const size_t count = rows * columns;
  if (!has_integer_weights(format)) {
    taken.values = cursor.take<float>(count);
    return taken;
  }
  taken.scales = cursor.take<float>(count / kGroup);
  if (format == kInt8) {
    taken.q = cursor.take<int16_t>(count);
  } else {
    taken.bytes = cursor.take<int8_t>(count);
    taken.middles = cursor.take<float>(count / kGroup);
    taken.totals = cursor.take<float>(count / kGroup);
  }
  return taken;
}

}  // namespace

Scratch::Scratch(const Model& model, int threads) : model_(model) {
  const int rows = std::max(kAttentionRows, model.shape.heads / model.shape.kv_heads);
  attention_bytes_ = model.kernels.attention_scratch[model.kv_format](model.kv, rows);
  attention_ = Mapping(threads * attention_bytes_);
}

void Scratch::reserve(int rows, int wanted) {
  if (rows <= rows_ && wanted <= wanted_) return;
  rows = std::max(rows, rows_), wanted = std::max(wanted, wanted_);
  Cursor counting(nullptr);
  lay_out(counting, rows, wanted);
  // Where there is not so much, there is room for no row: a smaller step must reserve anew.
  rows_ = wanted_ = 0;
  memory_ = Mapping();
  memory_ = Mapping(counting.used());
  Cursor cursor(memory_.data());
  lay_out(cursor, rows, wanted);
  rows_ = rows, wanted_ = wanted;
}

void Scratch::lay_out(Cursor& cursor, size_t rows, size_t wanted) {
  residual = cursor.take<float>(rows * model_.hidden);
  joined = cursor.take<float>(rows * model_.joined);
  attended = cursor.take<float>(rows * model_.attended);
  fed = cursor.take<float>(rows * model_.intermediate);
  const size_t angles = model_.shape.ropes * rows * model_.shape.head_dim / 2;
  cosines = cursor.take<float>(angles);
  sines = cursor.take<float>(angles);
  if (model_.shape.sandwich_norms) block = cursor.take<float>(rows * model_.hidden);
  narrow = take_rows(cursor, model_.format, rows, model_.hidden);
  heads = take_rows(cursor, model_.format, rows, model_.attended);
  wide = take_rows(cursor, model_.format, rows, model_.intermediate);
  last = take_rows(cursor, model_.head.format, wanted, model_.hidden);
}

}  // namespace tailrace
