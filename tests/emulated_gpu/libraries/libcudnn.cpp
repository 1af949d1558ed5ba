// cuDNN: descriptors that remember nothing; a graph has one engine, whose plan wants no workspace.
#include <cudnn.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

#define OK CUDNN_STATUS_SUCCESS
API size_t cudnnGetVersion() { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char *cudnnGetErrorString(cudnnStatus_t) { return "an error of the emulated cuDNN"; }
API void cudnnGetLastErrorString(char *s, size_t n) { if (n) *s = 0; }
API cudnnStatus_t cudnnGetProperty(libraryPropertyType t, int *v) { *v = t == MAJOR_VERSION ? CUDNN_MAJOR : t == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL; return OK; }
API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t t, cudnnBackendDescriptor_t *d) { int *p = (int *)calloc(1, 64); *p = t; *d = p; return OK; }
API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) { free(d); return OK; }
API cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t wanted, int64_t *n, void *to) {
  int64_t dummy; if (!n) n = &dummy;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: *n = 1; return OK;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: if (to) *(int64_t *)to = 0; *n = 1; return OK;
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: if (to) *(int64_t *)to = 1; *n = 1; return OK;
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE: case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE: case CUDNN_ATTR_ENGINE_KNOB_INFO: case CUDNN_ATTR_ENGINECFG_KNOB_CHOICES: *n = 0; return OK;
    default: break;
  }
  *n = 1;
  if (to && wanted > 0 && type == CUDNN_TYPE_INT64) *(int64_t *)to = 0;
  else if (type == CUDNN_TYPE_CHAR) { *n = 1; if (to && wanted) *(char *)to = 0; }
  return OK;
}
#define SIZE(name, ...) API cudnnStatus_t name(__VA_ARGS__, size_t *size) { *size = 0; return OK; }
SIZE(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t)
SIZE(cudnnGetBatchNormalizationBackwardExWorkspaceSize, cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t)
SIZE(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnActivationDescriptor_t, const cudnnTensorDescriptor_t)
SIZE(cudnnDropoutGetStatesSize, cudnnHandle_t)
SIZE(cudnnGetRNNWeightSpaceSize, cudnnHandle_t, cudnnRNNDescriptor_t)
API cudnnStatus_t cudnnGetStream(cudnnHandle_t, cudaStream_t *s) { *s = 0; return OK; }
API cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t, cudnnRNNDescriptor_t, cudnnForwardMode_t, cudnnRNNDataDescriptor_t, size_t *a, size_t *b) { *a = *b = 0; return OK; }
