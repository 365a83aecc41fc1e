#include "model/native/mlp.h"

#include "model/kinds/linear.h"
#include "model/kinds/mlp.h"

namespace gdn::model::native {

TensorId dense_mlp(Builder& b, TensorId m, const config::Model& model, const config::Run&, const Dims& d) {
  const std::int64_t ffn = model.ffn / d.tp;
  TensorId mn = rms_norm(b, "mlp_norm", m, b.param("mlp_norm", d.hidden, d.dtype), {model.norm_eps, model.zero_centred_norm}, "mn").y;
  TensorId fc1 = linear(b, "mlp_fc1", mn, b.param("mlp.fc1", 2 * ffn * d.hidden, d.dtype), 2 * ffn,
                        {TensorParallel::Column, d.tp, d.sp}, "fc1");                    // [N, gate | up]
  TensorId act = swiglu(b, "mlp_act", fc1, "act");                                       // [N, ffn]
  return linear(b, "mlp_fc2", act, b.param("mlp.fc2", ffn * d.hidden, d.dtype), d.hidden,
                {TensorParallel::Row, d.tp, d.sp}, "mlp_out");                           // [N_sp, h]
}

} // namespace gdn::model::native
