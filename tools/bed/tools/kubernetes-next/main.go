// The control plane of a newer Kubernetes in one binary, told apart by the name it is called with. Kubelets and
// kube-proxy stay those of tools/kubernetes: three minor versions behind their API server is supported.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

var programs = map[string]func() *cobra.Command{
	"kube-apiserver-next":          apiserver.NewAPIServerCommand,
	"kube-controller-manager-next": manager.NewControllerManagerCommand,
	"kube-scheduler-next":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
}

func main() {
	name := filepath.Base(os.Args[0])
	program, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%s: not a name of this binary. Call it through a link named kube-apiserver-next, "+
			"kube-controller-manager-next or kube-scheduler-next.\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(program()))
}
