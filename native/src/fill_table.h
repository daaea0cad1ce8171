// Fills a `Kernels` table for activations T with products by G. Included by each ISA's file, compiled with its flags.
#pragma once

#include "linear.h"
#include "table.h"

namespace qt::QT_ISA {

template <class G, class T>
constexpr Kernels make_kernels() {
  using L = Linear<G, T>;
  return Kernels{
      L::forward_scratch,
      [](Pool &pool, const void *x, const qt_linear *linears, int64_t count, const void *residual, int64_t tokens,
         const qt_dropout *dropout, void *scratch, size_t bytes) {
        return L::forward(pool, static_cast<const T *>(x), linears, count, static_cast<const T *>(residual), tokens, dropout,
                          scratch, bytes);
      },
      [](Pool &pool, const void *x, const qt_linear *linears, int64_t count, int64_t tokens, const qt_dropout *dropout,
         void *scratch, size_t bytes) {
        return L::lora_down(pool, static_cast<const T *>(x), linears, count, tokens, dropout, scratch, bytes);
      },
      L::backward_scratch,
      [](Pool &pool, void *dx, const void *x, const qt_linear *linears, int64_t count, int64_t tokens,
         const qt_dropout *dropout, void *scratch, size_t bytes) {
        return L::backward(pool, static_cast<T *>(dx), static_cast<const T *>(x), linears, count, tokens, dropout, scratch,
                           bytes);
      },
  };
}

}  // namespace qt::QT_ISA
