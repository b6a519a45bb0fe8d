#define CB_TABLE kernels_amx
#define CB_NAME "amx"
#include "amx.h"
#include "kernels.h"
