// NVML as far as torch asks: who uses the device (the text of an OutOfMemoryError), and devices for is_available by NVML.
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core.h"

struct Process { unsigned pid; unsigned long long used; };
struct Memory { unsigned long long total, free, used; };
static int index_of(void *d) { return (int)(size_t)d - 1; }
API int nvmlInit_v2() { return 0; }
API int nvmlInit() { return 0; }
API int nvmlShutdown() { return 0; }
API const char *nvmlErrorString(int) { return "an error of the emulated driver"; }
API int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
API int nvmlSystemGetDriverVersion(char *s, unsigned n) { snprintf(s, n, "580.00"); return 0; }
API int nvmlDeviceGetCount_v2(unsigned *n) { *n = emulated_devices(); return 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(size_t)(i + 1); return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *s, void **d) { unsigned a = 0, b = 0x10; sscanf(s, "%x:%x", &a, &b); *d = (void *)(size_t)(b - 0x10 + 1); return 0; }
API int nvmlDeviceGetUUID(void *d, char *s, unsigned n) { snprintf(s, n, "GPU-656d756c-6174-6564-2d64-6576696365%02x", index_of(d)); return 0; }
API int nvmlDeviceGetName(void *, char *s, unsigned n) { snprintf(s, n, "%s", emulated_name()); return 0; }
API int nvmlDeviceGetMemoryInfo(void *d, Memory *m) { m->total = emulated_total(); m->used = emulated_used(index_of(d)); m->free = m->total - m->used; return 0; }
API int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, Process *p) {
  if (!p || *n < 1) { *n = 1; return 7; }
  *n = 1; p[0] = {(unsigned)getpid(), emulated_used(index_of(d))}; return 0;
}
#define NOT(name) API int name() { return 3; }
NOT(nvmlDeviceGetNvLinkRemoteDeviceType) NOT(nvmlDeviceGetNvLinkRemotePciInfo_v2) NOT(nvmlDeviceGetP2PStatus) NOT(nvmlDeviceGetGpuFabricInfoV) NOT(nvmlDeviceGetHandleByUUID)
NOT(nvmlDeviceGetUtilizationRates) NOT(nvmlDeviceGetTemperature) NOT(nvmlDeviceGetPowerUsage)
