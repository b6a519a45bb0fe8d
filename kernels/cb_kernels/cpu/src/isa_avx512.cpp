#define CB_TABLE kernels_avx512
#define CB_NAME "avx512"
#include "kernels.h"
