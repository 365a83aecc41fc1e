#pragma once
#include "model/kinds/gdn_pre.h"
#include "model/native/gdn.h"

// What the mixers of GDN and GDN2 share.
namespace gdn::model::native {

// Heads of this rank, after the context-parallel exchange; q and k stay at Hk heads and are normalised
// by the front end.
GdnAttr gdn_attributes(const config::Model& model, const config::Run& run, const Dims& d);

// Norm, projection to `width` columns of this TP rank, exchange sequence -> heads.
TensorId project(Builder& b, TensorId x, std::int64_t width, const config::Model& model, const config::Run& run, const Dims& d);

// Parameters of the front end; gate widths are those of one rank after the exchange. Every context-parallel
// rank holds the parameters of all its TP rank's heads and uses its own heads' part.
GdnPreParams front_end_params(const Builder& b, std::int64_t a_log, std::int64_t dt_bias, const GdnAttr& attr, const Dims& d);

// Gated norm, exchange heads -> sequence, output projection.
TensorId project_out(Builder& b, TensorId o, TensorId z, const config::Model& model, const config::Run& run, const Dims& d);

} // namespace gdn::model::native
