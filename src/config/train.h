#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "config/node.h"

namespace gdn::config {

// The `train:` block of a configuration: what gdntrain does with a model and a run.
struct Train {
  std::int64_t steps = 20;
  std::uint64_t seed = 1234;
  // Learning rate: linear warm-up, then constant, linear or cosine down to min_lr at the last step.
  double lr = 1e-3, min_lr = 0;
  std::int64_t warmup_steps = 0;
  std::string lr_decay = "constant";
  double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double clip_grad = 1.0;             // largest gradient norm; 0: no clipping
  // Tokens: drawn from the seed ("synthetic"), a flat file of uint16 or uint32 ids ("tokens"), or a text
  // file whose bytes are the tokens ("text"). A relative path starts at the configuration file.
  std::string data = "synthetic";
  std::string data_path = {};
  std::string data_dtype = "uint16";  // tokens only
  // tokens only: the id that ends a document, for packed micro-batches; -1: none.
  std::int64_t eod_id = -1;

  double learning_rate(std::int64_t step) const; // step counts from 1
};

// Throws Error{Config} with position, key and what is allowed.
Train read_train(const Node& map);
// What keys say of one another: data and its path. Throws Error{Config}; `where` begins the message.
void check_complete(const Train& train, const std::string& where);
Node to_node(const Train& train);
// `--set train.lr=1e-3`: a key of the block, without "train.".
void apply(Train& train, const std::string& key, const std::string& value, const std::string& where);

} // namespace gdn::config
