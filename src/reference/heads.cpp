#include "reference/heads.h"

#include "reference/detail.h"

namespace gdn::reference {

template <class T> void copy(In<T> src, Grad<T> dst) {
  expect_shape(dst, src.rows, src.cols, "copy");
  for (int64 i = 0; i < src.rows; ++i)
    for (int64 j = 0; j < src.cols; ++j) store(dst.to(i, j), up(src(i, j)), dst.write);
}

template <class T> void repeat_heads_forward(int64 head, int64 repeat, In<T> x, Out<T> y) {
  expect(head > 0 && x.cols % head == 0, "head width does not divide the columns");
  expect_shape(y, x.rows, x.cols * repeat, "repeated heads");
  for (int64 i = 0; i < x.rows; ++i)
    for (int64 h = 0; h < x.cols / head; ++h)
      for (int64 r = 0; r < repeat; ++r)
        for (int64 j = 0; j < head; ++j) y(i, (h * repeat + r) * head + j) = x(i, h * head + j);
}

template <class T> void repeat_heads_backward(int64 head, int64 repeat, In<T> dy, Grad<T> dx) {
  expect_shape(dx, dy.rows, dy.cols / repeat, "gradient of repeated heads");
  for (int64 i = 0; i < dy.rows; ++i)
    for (int64 h = 0; h < dx.to.cols / head; ++h)
      for (int64 j = 0; j < head; ++j) {
        Acc<T> sum = 0;
        for (int64 r = 0; r < repeat; ++r) sum += up(dy(i, (h * repeat + r) * head + j));
        store(dx.to(i, h * head + j), sum, dx.write);
      }
}

template <class T> void take_section(const Interleave& s, In<T> mixed, Out<T> section) {
  expect_shape(mixed, section.rows, s.groups * s.group_width, "interleaved matrix");
  expect_shape(section, mixed.rows, s.groups * s.width, "section");
  for (int64 g = 0; g < s.groups; ++g)
    copy<T>(mixed.columns(g * s.group_width + s.offset, s.width),
            section.columns(g * s.width, s.width));
}

template <class T> void put_section(const Interleave& s, In<T> section, Grad<T> mixed) {
  expect_shape(mixed, section.rows, s.groups * s.group_width, "interleaved matrix");
  for (int64 g = 0; g < s.groups; ++g)
    copy<T>(section.columns(g * s.width, s.width),
            Grad<T>(mixed.to.columns(g * s.group_width + s.offset, s.width), mixed.write));
}

#define GDN_HEADS(T)                                                                               \
  template void copy<T>(In<T>, Grad<T>);                                                           \
  template void repeat_heads_forward<T>(int64, int64, In<T>, Out<T>);                              \
  template void repeat_heads_backward<T>(int64, int64, In<T>, Grad<T>);                            \
  template void take_section<T>(const Interleave&, In<T>, Out<T>);                                 \
  template void put_section<T>(const Interleave&, In<T>, Grad<T>);
GDN_HEADS(bf16)
GDN_HEADS(float)
GDN_HEADS(double)
#undef GDN_HEADS

} // namespace gdn::reference
