#define CB_TABLE kernels_amx
#define CB_NAME "amx"
#include "amx_decode.h"
#include "kernels.h"
