/* Kernels in portable C: the truth that every other table must equal. */
#define TABLE wc_kernels_generic
#define NAME "generic"
#define XXH_VECTOR XXH_SCALAR
#include "body.h"
