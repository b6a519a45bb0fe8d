#define CB_TABLE kernels_avx512_bf16
#define CB_NAME "avx512_bf16"
#include "kernels.h"
