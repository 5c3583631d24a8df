// The parts of ECharts that the pages of `dcpx inspect --html` and `dcpx diff --html` draw with.
import { init, use } from "echarts/core";
import { BarChart, CustomChart, TreemapChart } from "echarts/charts";
import { GridComponent, TooltipComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([BarChart, CustomChart, TreemapChart, GridComponent, TooltipComponent, CanvasRenderer]);
export { init };
