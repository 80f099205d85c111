/* A BLAS that sums every row of every shape of product in an order of its own.

   The same product gives the same numbers; the same row in a product of another shape, or at
   another place, rounds otherwise, as it may with any BLAS. So a test that holds here does not
   rest on how one library cuts its tiles.

   gcc -O3 -march=native -fassociative-math -fno-signed-zeros -fno-trapping-math -shared -fPIC \
       -o build/odd_blas.so tools/odd_blas.c
   KVLINGO_BLAS=$PWD/build/odd_blas.so python -m pytest                                             */
#include <stddef.h>
#include <stdint.h>

static int start_of(int M, int N, int K, int row) {
    uint32_t h = 2166136261u;
    int parts[4] = {M, N, K, row};
    for (int i = 0; i < 4; i++) h = (h ^ (uint32_t)parts[i]) * 16777619u, h ^= h >> 15;
    return K ? (int)(h % (uint32_t)K) : 0;
}

#define GEMM(NAME, T)                                                                           \
    static void rows_##NAME(int M, int N, int K, T alpha, const T *a, ptrdiff_t am,             \
                            ptrdiff_t ak, const T *b, ptrdiff_t bk, ptrdiff_t bn, T beta,       \
                            T *c, ptrdiff_t ldc) {                                              \
        for (int i = 0; i < M; i++) {                                                           \
            int first = start_of(M, N, K, i);                                                   \
            T *out = c + i * ldc;                                                               \
            if (bn == 1) {                                                                      \
                for (int j = 0; j < N; j++) out[j] = beta == 0 ? 0 : beta * out[j];             \
                for (int n = 0; n < K; n++) {                                                   \
                    int k = n + first < K ? n + first : n + first - K;                          \
                    T x = alpha * a[i * am + k * ak];                                           \
                    const T *row = b + k * bk;                                                  \
                    for (int j = 0; j < N; j++) out[j] += x * row[j];                           \
                }                                                                               \
                continue;                                                                       \
            }                                                                                   \
            for (int j = 0; j < N; j++) {                                                       \
                T late = 0, early = 0;                                                          \
                const T *x = a + i * am, *y = b + j * bn;                                       \
                if (ak == 1 && bk == 1) {                                                       \
                    for (int k = first; k < K; k++) late += x[k] * y[k];                        \
                    for (int k = 0; k < first; k++) early += x[k] * y[k];                       \
                } else {                                                                        \
                    for (int k = first; k < K; k++) late += x[k * ak] * y[k * bk];              \
                    for (int k = 0; k < first; k++) early += x[k * ak] * y[k * bk];             \
                }                                                                               \
                out[j] = alpha * (late + early) + (beta == 0 ? 0 : beta * out[j]);              \
            }                                                                                   \
        }                                                                                       \
    }                                                                                           \
    void cblas_##NAME(int order, int ta, int tb, int M, int N, int K, T alpha, const T *a,      \
                      int lda, const T *b, int ldb, T beta, T *c, int ldc) {                    \
        if (order == 102) { /* by columns: the transposed product by rows */                    \
            const T *p = a; int s = M, t = ta, l = lda;                                         \
            M = N; N = s; ta = tb; tb = t; a = b; b = p; lda = ldb; ldb = l;                    \
        }                                                                                       \
        int at = ta != 111, bt = tb != 111;                                                     \
        rows_##NAME(M, N, K, alpha, a, at ? 1 : lda, at ? lda : 1, b, bt ? 1 : ldb,             \
                    bt ? ldb : 1, beta, c, ldc);                                                \
    }

GEMM(sgemm, float)
GEMM(dgemm, double)
