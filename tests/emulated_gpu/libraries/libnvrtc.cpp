// NVRTC: programs that are empty.
#include <nvrtc.h>
#include <string.h>

#include "core.h"

API nvrtcResult nvrtcVersion(int *a, int *b) { *a = 13; *b = 0; return NVRTC_SUCCESS; }
API const char *nvrtcGetErrorString(nvrtcResult) { return "emulated nvrtc"; }
API nvrtcResult nvrtcGetPTXSize(nvrtcProgram, size_t *n) { *n = 1; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetPTX(nvrtcProgram, char *s) { *s = 0; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, size_t *n) { *n = 1; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char *s) { *s = 0; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t *n) { *n = 1; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char *s) { *s = 0; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetLoweredName(nvrtcProgram, const char *const, const char **s) { *s = "kernel"; return NVRTC_SUCCESS; }
