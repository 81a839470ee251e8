/* What torch's backward passes ask a CUDA driver, on a machine without one: preloaded by `make fake-cuda`. Other calls
   find no driver, as without this library. */

int fake_devices = 0; /* set while a backward pass runs */

signed char _ZN3c104cuda12device_countEv(void) { return fake_devices; } /* c10::cuda::device_count() */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 0; /* no context: no streams to wait for */
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}
