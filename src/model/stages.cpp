#include "model/stages.h"

#include <fmt/format.h>

#include "core/error.h"

namespace gdn::model {

std::vector<Chunk> pipeline_chunks(std::int64_t layers, const config::Parallel& parallel) {
  const std::int64_t count = parallel.pp * parallel.vp;
  std::vector<std::int64_t> sizes = parallel.layout;
  if (sizes.empty()) {
    if (layers % count != 0)
      throw Error(
          ErrorCode::Config,
          fmt::format("{} layers do not divide by pp {} x vp {}", layers, parallel.pp, parallel.vp),
          "give the layers of every stage with pipeline_model_parallel_layout");
    sizes.assign(static_cast<size_t>(count), layers / count);
  }
  std::int64_t sum = 0;
  for (std::int64_t n : sizes) sum += n;
  if (static_cast<std::int64_t>(sizes.size()) != count || sum != layers)
    throw Error(ErrorCode::Config,
                fmt::format("pipeline_model_parallel_layout [{}] must name {} stages (pp {} x vp "
                            "{}) of {} layers together",
                            fmt::join(sizes, ", "), count, parallel.pp, parallel.vp, layers));
  std::vector<Chunk> chunks;
  std::int64_t first = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t n = sizes[static_cast<size_t>(i)];
    chunks.push_back({i % parallel.pp, i / parallel.pp, first, n, i == 0, i == count - 1});
    first += n;
  }
  return chunks;
}

std::vector<Chunk> chunks_of_rank(std::int64_t layers, const config::Parallel& parallel,
                                  std::int64_t rank) {
  std::vector<Chunk> own;
  for (const Chunk& c : pipeline_chunks(layers, parallel))
    if (c.rank == rank) own.push_back(c);
  return own;
}

} // namespace gdn::model
