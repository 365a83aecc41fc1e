#include "trainer/cpu/collectives.h"

#include "reference/heads.h"
#include "reference/mlp.h"

namespace gdn::trainer::cpu {

View take(std::span<std::byte>& memory, DType dtype, std::int64_t rows, std::int64_t cols) {
  const auto bytes = static_cast<size_t>(round_up(rows * cols * size_of(dtype), 8)); // so that the next one is aligned
  if (memory.size() < bytes) throw Error(ErrorCode::Internal, "an op asks for more scratch than it declared");
  const View v{memory.data(), dtype, rows, cols, cols};
  memory = memory.subspan(bytes);
  return v;
}

void copy_view(const View& from, const GradView& to) {
  with_type(from.dtype, [&]<class T>() { reference::copy<T>(mat<T>(from), grad<T>(to)); });
}

View rows_of(const View& v, std::int64_t first, std::int64_t rows) {
  return {v.data + first * v.stride * size_of(v.dtype), v.dtype, rows, v.cols, v.stride};
}

std::span<std::int64_t> ids_of(const View& v) {
  mat<std::int64_t>(v); // checks the dtype
  return {reinterpret_cast<std::int64_t*>(v.data), static_cast<size_t>(v.rows * v.cols)};
}

void gather_rows(Communicator& group, const View& mine, const View& all) {
  const View part = rows_of(all, group.rank() * mine.rows, mine.rows);
  if (part.data != mine.data) copy_view(mine, part);
  group.all_gather(part.data, all.data, mine.rows * mine.cols * size_of(mine.dtype));
}

void scatter_sum(Communicator& group, const View& all, const GradView& mine) {
  const std::int64_t rows = all.rows / group.size();
  const View part = rows_of(all, group.rank() * rows, rows);
  group.reduce_scatter(all.data, part.data, part.rows * part.cols, part.dtype);
  copy_view(part, mine);
}

void reduce(Communicator& group, const View& v, Reduction reduction) {
  if (v.rows > 1 && v.stride != v.cols) throw Error(ErrorCode::Internal, "a strided matrix is summed over ranks");
  group.all_reduce(v.data, v.rows * v.cols, v.dtype, reduction);
}

} // namespace gdn::trainer::cpu
