// The parts of ECharts that the pages of `--html` draw with.
import { init, use } from "echarts/core";
import { BarChart, CustomChart } from "echarts/charts";
import { GridComponent, TooltipComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([BarChart, CustomChart, GridComponent, TooltipComponent, CanvasRenderer]);
export { init };
