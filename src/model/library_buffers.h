#pragma once
#include <string>
#include <vector>

#include "config/run.h"
#include "model/op.h"

// What the libraries under stack `megatron` allocate once, through PyTorch, and keep for the whole run.
namespace gdn::model {

struct LibraryBuffer {
  std::string name, source;
  Bytes bytes = 0;
};

// Of a rank that runs `lists`. Empty for stack native: gdntrain allocates nothing of the kind.
//  - Transformer Engine (2.4 and later [inferred]) adds weight gradients to the main gradients inside the GEMM and hands autograd a
//    dummy in the weight's shape and dtype: one cached tensor a shape (module/_common.py, get_dummy_wgrad).
//  - Megatron-LM gathers the input of linears that are its own (the output layer; all of them in build
//    local) into one global buffer (tensor_parallel/layers.py).
std::vector<LibraryBuffer> library_buffers(const std::vector<const OpList*>& lists, const config::Run& run);

} // namespace gdn::model
