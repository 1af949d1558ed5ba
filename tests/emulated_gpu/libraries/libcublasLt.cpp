// cuBLASLt: one algorithm for every product, which needs no workspace.
#include <cublasLt.h>
#include <string.h>

#include "core.h"

API size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
API size_t cublasLtGetCudartVersion() { return 13000; }
API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                  cublasLtMatmulPreference_t, int wanted, cublasLtMatmulHeuristicResult_t *r, int *n) {
  *n = wanted > 0;
  if (*n) { memset(r, 0, sizeof *r); r->state = CUBLAS_STATUS_SUCCESS; r->wavesCount = 1; }
  return CUBLAS_STATUS_SUCCESS;
}
