#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "config/run.h"
#include "config/train.h"
#include "trainer/session.h"

namespace gdn::trainer {

// Where tokens come from. A batch is a pure function of (step, micro-batch), so a resumed run sees the
// same data and nothing about the source has to be stored.
class Tokens {
public:
  virtual ~Tokens() = default;
  virtual std::string describe() const = 0;  // "text examples/data/river.txt, 31,204 bytes"
  // Micro-batch `index` of `step` (from 0): `sequences` rows of `seq` tokens, labels one token ahead.
  virtual Batch batch(std::uint64_t step, std::uint64_t index, std::int64_t sequences, std::int64_t seq) const = 0;
  // The most documents that any packed micro-batch of `tokens` tokens can have; 0 where there are none.
  virtual std::int64_t most_documents(std::int64_t) const { return 0; }
};

// The source a configuration names; `folder` is where relative paths start. `packed`: a micro-batch is
// whole documents one after the other (the last is cut where the row ends), with their offsets, and no
// label crosses from one to the next. Documents of a text end at blank lines, those of a token file
// with the id train.eod_id, which belongs to them; synthetic ones have lengths drawn from the seed.
// Throws Error{Config} for a file that is not there, that is too short or holds ids >= vocab, Error{Io}
// for one that cannot be read.
std::unique_ptr<Tokens> open_tokens(const config::Train& train, const std::filesystem::path& folder,
                                    std::int64_t vocab, std::int64_t seq, bool packed = false);
// The source for micro-batches of `run`. Throws Error{Config} besides if one of them could have more documents than the run
// has room for (model::most_sequences): before the first step, not at some later one.
std::unique_ptr<Tokens> open_tokens(const config::Train& train, const std::filesystem::path& folder, std::int64_t vocab,
                                    const config::Run& run);

// The micro-batches of one step that data-parallel rank `data_rank` runs. Micro-batches of the whole step are
// dealt out in turn, so all layouts see the same tokens.
std::vector<Batch> step_batches(const Tokens& tokens, const config::Run& run, std::uint64_t step, std::int64_t data_rank = 0);

} // namespace gdn::trainer
