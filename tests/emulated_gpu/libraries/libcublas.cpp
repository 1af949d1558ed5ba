// cuBLAS: modes and versions.
#include <cublas_api.h>

#include "core.h"

API cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t *m) { *m = CUBLAS_DEFAULT_MATH; return CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t *m) { *m = CUBLAS_POINTER_MODE_HOST; return CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int *v) { *v = CUBLAS_VERSION; return CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasGetProperty(libraryPropertyType t, int *v) { *v = t == MAJOR_VERSION ? CUBLAS_VER_MAJOR : t == MINOR_VERSION ? CUBLAS_VER_MINOR : CUBLAS_VER_PATCH; return CUBLAS_STATUS_SUCCESS; }
